// The CUDA side of loss.h; arguments as there, checked by the caller.  Scratch is taken before planning returns.
#pragma once

#include "kernels/loss/loss.h"

namespace kestrel::cuda {

// Rows of logits held at a time: at most 512 MiB of them, in multiples of 128, and blocks of nearly equal size.  Each
// block reads and writes dw [V,D] once, so few blocks are better than many.
inline int64_t logit_rows(int64_t N, int64_t V, DType dtype) {
  constexpr int64_t kBytes = int64_t{512} << 20, kMultiple = 128;
  const int64_t most = kBytes / (V * size_of(dtype)) / kMultiple * kMultiple;
  const int64_t rows = most > kMultiple ? most : kMultiple, blocks = N > rows ? (N + rows - 1) / rows : 1;
  const int64_t even = ((N + blocks - 1) / blocks + kMultiple - 1) / kMultiple * kMultiple;
  return even < N ? even : N;
}

void linear_cross_entropy(Stream& s, Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets,
                          float grad_scale);
// logits and dlogits (may be empty, may alias) F32 or BF16.
void cross_entropy(Stream& s, Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float grad_scale);

}  // namespace kestrel::cuda
