// What happens to a parameter after its gradient is known.  kernels/optimizer/README.md: Muon and its constants.
//
// All tensors F32 (masters, gradients, moments).
#pragma once

#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

// AdamW with decoupled decay; t counts from 1.
//   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= lr ( (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps) + decay p )
struct AdamW {
  float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
  int64_t t = 1;
};
// g is read as grad_scale * g (clipping), and left unchanged.
void adamw_step(Stream& s, const AdamW& h, Tensor p, Tensor g, Tensor m, Tensor v, float grad_scale);

// Newton-Schulz orthogonalisation of every x[i] of x [n, rows, cols], in place (quintic, Jordan's coefficients
// 3.4445, -4.7750, 2.0315):  X = G / (|G|_F + 1e-30);  A = X X^T;  X <- a X + (b A + c A A) X;   rows > cols: on the
// transpose. A zero matrix stays zero.  The CPU computes in F32, CUDA in BF16 with F32 accumulation.
void newton_schulz(Stream& s, Tensor x, int steps);

// Muon:  m = mu m + g;   u = nesterov ? g + mu m : m;   p -= lr ( update_scale sqrt(max(rows, cols)) NS(u) + decay p )
// per block.
struct Muon {
  float lr, momentum = 0.95f, weight_decay = 0.1f;
  bool nesterov = true;
  int ns_steps = 5;
  float update_scale = 0.2f;
  bool fp32_newton_schulz = false;  // CUDA: iterate in F32 instead of BF16; the CPU always does
};
// p, g, m: [count, rows, cols] contiguous, one block each; all blocks of a call have one shape.
// Blocks that interleave in memory (the K and V blocks of kv_b) are passed as rank-3 views with `block_stride` elements
// from one block to the next (0: rows * cols).
void muon_step(Stream& s, const Muon& h, Tensor p, Tensor g, Tensor m, int64_t block_stride, float grad_scale);

// Sum of squares of all tensors, accumulated in fp64 in a fixed order: out[0] F64 += .  A NaN or Inf anywhere makes it
// non-finite.
void sum_of_squares(Stream& s, Tensor out, const std::vector<Tensor>& tensors);

// QK-clip: s_max [H] largest scaled logit per head; tau < s_max < inf: gamma = tau / s_max, q rows of the nope part and
// k rows times sqrt(gamma), q rows of the rope part times gamma.  w_q [H*(nope+rope), in], w_kv [H*(nope+v), c], in
// place.
void qk_clip(Stream& s, Tensor w_q, Tensor w_kv, Tensor s_max, float tau, int64_t nope, int64_t rope, int64_t v);

// MXFP4: groups of 32 along the input dimension share a scale 2^e, e = floor(log2 amax) - 2 (OCP rule; E8M0 byte e +
// 127, an all-zero group has 127), values to the nearest of 0 .5 1 1.5 2 3 4 6 (ties to the even code), saturating. Low
// nibble = even input index.  A group with a NaN or infinity has byte 255 and unpacks to NaN. w [out,in] F32, in % 32
// == 0; packed [out,in/2] U8; scale [out,in/32] U8; dequantized [out,in] F32.
void mxfp4_pack(Stream& s, Tensor packed, Tensor scale, Tensor w);
void mxfp4_unpack(Stream& s, Tensor dequantized, Tensor packed, Tensor scale);
void mxfp4_fake_quantize(Stream& s, Tensor dequantized, Tensor w);  // straight-through: gradients pass unchanged

}  // namespace kestrel
