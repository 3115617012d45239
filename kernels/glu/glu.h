// Gated linear units, and a plain sigmoid gate.
//
//   SiTU-GLU  y = beta tanh(a/beta) sigmoid(a) * linear_beta tanh(b/linear_beta)
//             (sigmoid sees the raw a; fp32, one rounding)
//   SwiGLU    y = a sigmoid(a) * b
//   with row_scale p [N] F32 (may be empty):  y = p * glu(a, b)   (routing probability before the down projection)
//
// Shapes: a, b, y [N, F] (any ld: a and b are usually the halves of one product).  Backward overwrites da, db and
// drow_scale [N] = sum_f dy glu(a, b) (empty: not wanted).  Saves nothing beyond a and b.
// In place: y may be a or b; da may be a, db may be b.  N = 0 is allowed; beta, linear_beta > 0.
// A shape or dtype that does not fit is a ContractError.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

struct Glu {
  enum class Kind : uint8_t { situ, silu } kind = Kind::situ;
  float beta = 4.f, linear_beta = 25.f;  // SiTU only
};

void glu_forward(Stream& s, const Glu& glu, Tensor y, Tensor a, Tensor b, Tensor row_scale = {});
void glu_backward(Stream& s, const Glu& glu, Tensor da, Tensor db, Tensor drow_scale, Tensor dy, Tensor a, Tensor b,
                  Tensor row_scale = {});

// y = o sigmoid(gate);  backward overwrites d_o = dy sigmoid(gate), dgate = dy o s (1-s).  All [N, D], any ld.
// In place: y may be o; d_o may be dy or o, dgate may be gate.
void sigmoid_gate_forward(Stream& s, Tensor y, Tensor o, Tensor gate);
void sigmoid_gate_backward(Stream& s, Tensor d_o, Tensor dgate, Tensor dy, Tensor o, Tensor gate);

}  // namespace kestrel
