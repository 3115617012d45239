// The CUDA side of glu.h; arguments as there, checked by the caller.
#pragma once

#include "kernels/glu/glu.h"

namespace kestrel::cuda {

void glu_forward(Stream& s, const Glu& glu, Tensor y, Tensor a, Tensor b, Tensor row_scale);
void glu_backward(Stream& s, const Glu& glu, Tensor da, Tensor db, Tensor drow_scale, Tensor dy, Tensor a, Tensor b,
                  Tensor row_scale);
void sigmoid_gate_forward(Stream& s, Tensor y, Tensor o, Tensor gate);
void sigmoid_gate_backward(Stream& s, Tensor d_o, Tensor dgate, Tensor dy, Tensor o, Tensor gate);

}  // namespace kestrel::cuda
