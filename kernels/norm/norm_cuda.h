// The CUDA side of norm.h; arguments as there, checked by the caller.  Backward takes its scratch from the stream and
// returns when the stream is only planning.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel::cuda {

void rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor weight, float eps);
void rms_norm_backward(Stream& s, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight, Tensor rstd,
                       float dx_beta);
void gated_rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor gate, Tensor weight, float eps);
void gated_rms_norm_backward(Stream& s, Tensor dx, Tensor dgate, Tensor dweight, Tensor dy, Tensor x, Tensor gate,
                             Tensor weight, Tensor rstd);
void l2_norm_forward(Stream& s, Tensor y, Tensor x, float eps);
void l2_norm_backward(Stream& s, Tensor dx, Tensor dy, Tensor x, float eps);

}  // namespace kestrel::cuda
