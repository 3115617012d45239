// Causal depthwise convolution of width W over time, then SiLU.
//
//   u[b,t,c] = sum_{i<W} w[c,i] x[b, t-(W-1)+i, c]      (tap W-1 is the current token)
//   y = u sigmoid(u)
//
// Taps before the start of the row read `history` (if given) or zero; taps before document_start[b,t] read zero, so a
// start of 0 hides the history.
// Shapes: x, y [B*T, C] (any ld), w [C, W] F32 (the checkpoint's [C, 1, W] is taken as it is), history [B*(W-1), C]
// (the W-1 inputs before the row, oldest first, for decoding; forward only), document_start [B,T] I32 or empty.
// 1 <= W <= 8.  Backward overwrites dx and adds to dw (F32); u is recomputed, nothing is saved.
// Not in place: y is not x, dx is neither x nor dy.  B T = 0 is allowed.  A shape or dtype that does not fit is a
// ContractError.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

void short_conv_forward(Stream& s, int64_t B, int64_t T, Tensor y, Tensor x, Tensor weight, Tensor document_start,
                        Tensor history = {});
void short_conv_backward(Stream& s, int64_t B, int64_t T, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight,
                         Tensor document_start);

}  // namespace kestrel
