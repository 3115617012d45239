// The linear cross entropy on CUDA: three products a block of rows (6 N V D operations in all, bound by tensor cores)
// and the fused kernel of cross_entropy.cu between them.  The block of logits holds the activations' dtype.
#include "kernels/loss/loss_cuda.h"

#include "kernels/gemm/gemm.h"

namespace kestrel::cuda {

void linear_cross_entropy(Stream& s, Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets,
                          float grad_scale) {
  const int64_t N = x.rows(), V = w.rows();
  const Tensor all_x = x.matrix(), all_dx = dx ? dx.matrix() : dx;
  losses = losses.view({N});
  targets = targets.view({N});
  ScratchScope scope(s);
  const Tensor block = s.temp({logit_rows(N, V, x.dtype), V}, x.dtype);
  for (int64_t first = 0; first < N; first += block.rows()) {
    const int64_t n = block.rows() < N - first ? block.rows() : N - first;
    const Tensor z = block.slice(0, n), rows = all_x.slice(first, n);
    gemm(s, z, rows, Trans::no, w.matrix(), Trans::yes);
    cuda::cross_entropy(s, losses.slice(first, n), dx || dw ? z : Tensor(), z, targets.slice(first, n), grad_scale);
    if (dx) gemm(s, all_dx.slice(first, n), z, Trans::no, w.matrix(), Trans::no);
    if (dw) gemm(s, dw.matrix(), z, Trans::yes, rows, Trans::no, 1.f, 1.f);
  }
}

}  // namespace kestrel::cuda
