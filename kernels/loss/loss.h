// Cross entropy of a linear classifier, without holding all logits.
//
//   z = x w^T [N,V];   loss_n = logsumexp(z_n) - z_n[target_n]    (nats; 0 where target_n == -100)
// One call does forward and backward, in blocks of rows: the logits of a block live in scratch only.
//   dx[n,:] = grad_scale (softmax(z_n) - onehot) w   (overwrites; skipped when dx is empty; rows with target -100 get
//   0) dw += grad_scale sum_n (softmax(z_n) - onehot)^T x_n   (adds; skipped when dw is empty)
// The step's loss is  sum_n loss_n / (valid targets of the whole global batch): pass its inverse as grad_scale.
//
// Shapes: x [N,D], w [V,D], targets [N] I32 in [0,V) or -100, losses [N] F32.  logsumexp in fp32 with the row maximum
// taken out.  A target outside [0,V) is a DataError on the CPU; on CUDA, where the host does not wait for the answer,
// the row's loss and gradient become NaN, which the step's finite check sees. dtypes: F32; on CUDA x, w and dx may be
// BF16 (dw stays F32): the block of logits and its gradient are then BF16 too, everything between them fp32.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

constexpr int32_t kIgnoreTarget = -100;

void linear_cross_entropy(Stream& s, Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets,
                          float grad_scale);

// The plain form on given logits [N,V] F32 (tests, small evaluations): losses [N]; dlogits (may be empty, may alias
// logits) = grad_scale (softmax - onehot).
void cross_entropy(Stream& s, Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float grad_scale);

}  // namespace kestrel
