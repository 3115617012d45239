#include "kernels/embedding/embedding_cpu.h"

#include <algorithm>

#include "kernels/core/parallel.h"

namespace kestrel::cpu {

void check_ids(const int32_t* ids, int64_t count, int64_t vocabulary) {
  for (int64_t n = 0; n < count; ++n) {
    KESTREL_CHECK(ids[n] >= 0 && ids[n] < vocabulary, "ids[", n, "] is ", ids[n], ", the table has ", vocabulary,
                  " rows");
  }
}

void embedding_forward(const Tensor& y, const int32_t* ids, const Tensor& table) {
  float *out = y.f32(), *rows = table.f32();
  const int64_t D = table.cols();
  parallel_for(y.rows(), [&](int64_t n) { std::copy_n(rows + ids[n] * table.ld, D, out + n * y.ld); });
}

// A token may occur many times, so rows cannot be dealt out to threads; columns can: each block of columns walks all
// tokens in order, which fixes the order of the additions whatever the number of threads.
void embedding_backward(const Tensor& dtable, const Tensor& dy, const int32_t* ids) {
  constexpr int64_t kColumns = 64;
  float *rows = dtable.f32(), *d_out = dy.f32();
  const int64_t N = dy.rows();
  parallel_pieces(dy.cols(), kColumns, [&](int64_t first, int64_t last) {
    for (int64_t n = 0; n < N; ++n) {
      const float* d = d_out + n * dy.ld;
      float* to = rows + ids[n] * dtable.ld;
#pragma omp simd
      for (int64_t c = first; c < last; ++c) to[c] += d[c];
    }
  });
}

}  // namespace kestrel::cpu
