// The CPU side of kernels/norm: whole operations, and the row kernels that fused operations build on.
//
// The row kernels are defined in one place and not inlined, so every caller gets the same bits from the same row.
#pragma once

#include "kernels/core/tensor.h"

namespace kestrel::cpu {

// (mean(x^2) + eps)^(-1/2) over D elements.
float rms_rstd(const float* x, int64_t D, float eps);
// y = w x r; y may be x.
void scale_row(float* y, const float* x, const float* w, float r, int64_t D);
// dx = (add ? dx : 0) + gradient of x; dw += dy x r.  dx may be dy unless add.
void rms_norm_backward_row(float* dx, float* dw, const float* dy, const float* x, const float* w, float r, int64_t D,
                           bool add);

void rms_norm_forward(const Tensor& y, float* rstd, const Tensor& x, const float* w, float eps);
// partial [row_pieces(N), D] is scratch.
void rms_norm_backward(const Tensor& dx, float* dw, const Tensor& dy, const Tensor& x, const float* w,
                       const float* rstd, bool add, float* partial);

// K = columns of one head; partial [row_pieces(N), K] is scratch.
void gated_rms_norm_forward(const Tensor& y, float* rstd, const Tensor& x, const Tensor& gate, const float* w,
                            int64_t K, float eps);
void gated_rms_norm_backward(const Tensor& dx, const Tensor& dgate, float* dw, const Tensor& dy, const Tensor& x,
                             const Tensor& gate, const float* w, const float* rstd, int64_t K, float* partial);

void l2_norm_forward(const Tensor& y, const Tensor& x, float eps);
void l2_norm_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, float eps);

}  // namespace kestrel::cpu
