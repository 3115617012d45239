// Root-mean-square norms over the last axis.
//
//   rms_norm        y = w x r,              r = (mean(x^2) + eps)^(-1/2)
//   gated_rms_norm  y = w x r sigmoid(g)    one weight [K] shared by all heads: x, g, y are [rows, K]
//
// Shapes: x, y [N, D] (x and y may be column blocks: ld >= D), w [D] F32, rstd [N] F32 (saved for backward).
// dtypes: x, y, g in the activation dtype; statistics in fp32.
// Backward overwrites dx and dgate, and adds to dw (F32).  With u = w dy:  dx = r u - x r^3 mean(u x);
// dw += sum_rows dy x r.  On the GPU dx of rms_norm may be F32 beside BF16 activations.
// In place: y may be x; dx may be dy (not with dx_beta = 1, and for the gated form not x or gate); dgate may be gate.
// N = 0 is allowed; D, K >= 1.  A shape or dtype that does not fit is a ContractError.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

void rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor weight, float eps);
// dx_beta = 1 adds to dx instead of overwriting it (0 and 1 are the only values).
void rms_norm_backward(Stream& s, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight, Tensor rstd,
                       float dx_beta = 0.f);

// x, y, gate, dy, dx, dgate are matrices [N, H*K] (any ld) seen as N*H rows of K = weight.cols(); rstd [N, H].
void gated_rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor gate, Tensor weight, float eps);
void gated_rms_norm_backward(Stream& s, Tensor dx, Tensor dgate, Tensor dweight, Tensor dy, Tensor x, Tensor gate,
                             Tensor weight, Tensor rstd);

// y = x (sum x^2 + eps)^(-1/2) per row; dx = rho (dy - y <y, dy>) with y recomputed in fp32 from x.  Overwrites.
void l2_norm_forward(Stream& s, Tensor y, Tensor x, float eps);
void l2_norm_backward(Stream& s, Tensor dx, Tensor dy, Tensor x, float eps);

}  // namespace kestrel
