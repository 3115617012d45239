#include "kernels/embedding/embedding.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/embedding/embedding_cpu.h"
#include "kernels/embedding/embedding_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for embeddings in this build");
}

void check_ids_shape(const Tensor& ids, int64_t rows) {
  KESTREL_CHECK(ids.dtype == DType::i32 && ids.numel() == rows && ids.contiguous(), "ids is ", ids.describe(),
                ", expected I32 with ", rows, " contiguous elements");
}

}  // namespace

void embedding_forward(Stream& s, Tensor y, Tensor ids, Tensor table) {
  const OpRange range(s, "embedding_forward");
  check_matrix("y", y, table.dtype, y.rows(), table.cols());
  check_ids_shape(ids, y.rows());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::embedding_forward(s, y, ids, table);
  }
  require_cpu(s);
  cpu::check_ids(ids.i32(), ids.numel(), table.rows());
  cpu::embedding_forward(y, ids.i32(), table);
}

void embedding_backward(Stream& s, Tensor dtable, Tensor dy, Tensor ids) {
  const OpRange range(s, "embedding_backward");
  check_matrix("dtable", dtable, DType::f32, dtable.rows(), dy.cols());
  check_ids_shape(ids, dy.rows());
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::embedding_backward(s, dtable, dy, ids);
  }
  if (s.planning()) return;
  require_cpu(s);
  cpu::check_ids(ids.i32(), ids.numel(), dtable.rows());
  cpu::embedding_backward(dtable, dy, ids.i32());
}

}  // namespace kestrel
