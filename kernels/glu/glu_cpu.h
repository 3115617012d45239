// The CPU side of kernels/glu.  Shapes as in glu.h, checked by the caller; an empty tensor or null is "not given".
#pragma once

#include "kernels/glu/glu.h"

namespace kestrel::cpu {

void glu_forward(const Glu& glu, const Tensor& y, const Tensor& a, const Tensor& b, const float* row_scale);
void glu_backward(const Glu& glu, const Tensor& da, const Tensor& db, float* drow_scale, const Tensor& dy,
                  const Tensor& a, const Tensor& b, const float* row_scale);
void sigmoid_gate_forward(const Tensor& y, const Tensor& o, const Tensor& gate);
void sigmoid_gate_backward(const Tensor& d_o, const Tensor& dgate, const Tensor& dy, const Tensor& o,
                           const Tensor& gate);

}  // namespace kestrel::cpu
