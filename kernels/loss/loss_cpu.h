// CPU side of the loss.  Included by this room only.
#pragma once

#include <algorithm>

#include "kernels/loss/loss.h"

namespace kestrel::cpu {

// Rows of logits held at a time: about 16 MB of them, at least 8 rows so that the weight is not read for each token.
inline int64_t logit_rows(int64_t N, int64_t V) {
  constexpr int64_t kFloats = int64_t{4} << 20;
  const int64_t rows = std::max(int64_t{8}, kFloats / std::max(V, int64_t{1}) / 8 * 8);
  return std::min(N, rows);
}

// Throws DataError at a target outside [0, V) that is not kIgnoreTarget.
void check_targets(const int32_t* targets, int64_t N, int64_t V);

// The plain form on rows of logits; dlogits may be null.
void cross_entropy(int64_t N, int64_t V, float* losses, float* dlogits, int64_t ldd, const float* logits, int64_t ldz,
                   const int32_t* targets, float grad_scale);
// block [logit_rows(N, V), V]: scratch.
void linear_cross_entropy(Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets, float grad_scale,
                          Tensor block);

}  // namespace kestrel::cpu
