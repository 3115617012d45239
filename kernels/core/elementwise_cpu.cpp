#include <cstring>

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/elementwise_cuda.h"
#include "kernels/core/parallel.h"
#include "kernels/core/profile.h"

namespace kestrel {
namespace {

constexpr int64_t kRowGrain = 64;

char* row_of(const Tensor& t, int64_t r) {
  return static_cast<char*>(t.data) + r * t.ld * size_of(t.dtype);
}

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for this operation in this build");
}

}  // namespace

void fill_zero(Stream& s, Tensor t) {
  const OpRange range(s, "fill_zero");
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::fill_zero(s, t);
  }
  require_cpu(s);
  parallel_pieces(t.rows(), kRowGrain, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) std::memset(row_of(t, r), 0, static_cast<size_t>(t.cols() * size_of(t.dtype)));
  });
}

void copy_cast(Stream& s, Tensor out, Tensor in) {
  const OpRange range(s, "copy_cast");
  KESTREL_CHECK(out.rows() == in.rows() && out.cols() == in.cols(), "copy ", in.describe(), " to ", out.describe());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::copy_cast(s, out, in);
  }
  require_cpu(s);
  const int64_t n = in.cols();
  parallel_pieces(in.rows(), kRowGrain, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) {
      char *o = row_of(out, r), *i = row_of(in, r);
      if (out.dtype == in.dtype) {
        std::memmove(o, i, static_cast<size_t>(n * size_of(in.dtype)));
      } else if (out.dtype == DType::bf16 && in.dtype == DType::f32) {
        for (int64_t c = 0; c < n; ++c) reinterpret_cast<bf16*>(o)[c] = bf16(reinterpret_cast<const float*>(i)[c]);
      } else if (out.dtype == DType::f32 && in.dtype == DType::bf16) {
        for (int64_t c = 0; c < n; ++c)
          reinterpret_cast<float*>(o)[c] = static_cast<float>(reinterpret_cast<const bf16*>(i)[c]);
      } else {
        KESTREL_CHECK(false, "no cast from ", in.describe(), " to ", out.describe());
      }
    }
  });
}

namespace {

template <class T>
void add_rows(const Tensor& out, const Tensor& in, T scale) {
  const int64_t n = in.cols();
  parallel_pieces(in.rows(), kRowGrain, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) {
      T* o = reinterpret_cast<T*>(row_of(out, r));
      const T* i = reinterpret_cast<const T*>(row_of(in, r));
      for (int64_t c = 0; c < n; ++c) o[c] += scale * i[c];
    }
  });
}

}  // namespace

void add_into(Stream& s, Tensor out, Tensor in, float scale) {
  const OpRange range(s, "add_into");
  KESTREL_CHECK(out.rows() == in.rows() && out.cols() == in.cols() && out.dtype == in.dtype, "add ", in.describe(),
                " into ", out.describe());
  const bool rounded = in.dtype == DType::bf16 && s.device() == Device::cuda;  // the sum is rounded once
  KESTREL_CHECK(in.dtype == DType::f32 || rounded || (in.dtype == DType::i32 && scale == 1.f), "add of ", in.describe(),
                " times ", scale, "; integer counts are added unscaled");
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::add_into(s, out, in, scale);
  }
  require_cpu(s);
  if (in.dtype == DType::i32) {
    add_rows<int32_t>(out, in, 1);
  } else {
    add_rows<float>(out, in, scale);
  }
}

void document_starts(Stream& s, Tensor document_start, Tensor segment) {
  const OpRange range(s, "document_starts");
  KESTREL_CHECK(segment.rank == 2, "segment is ", segment.describe(), ", expected I32 [B,T]");
  check_matrix("document_start", document_start, DType::i32, segment.rows(), segment.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::document_starts(s, document_start, segment);
  }
  require_cpu(s);
  const int64_t T = segment.cols();
  for (int64_t b = 0; b < segment.rows(); ++b) {
    const int32_t* id = segment.i32() + b * segment.ld;
    int32_t* start = document_start.i32() + b * document_start.ld;
    for (int64_t t = 0; t < T; ++t) start[t] = t > 0 && id[t] == id[t - 1] ? start[t - 1] : static_cast<int32_t>(t);
  }
}

}  // namespace kestrel
