// Expert choice for each token, and its gradient.
//
//   s = sigmoid(logits)  [N,E] fp32
//   selection on s + bias under the total order (value descending, expert index ascending), listed in that order:
//     top_k      the first k;  cutoff alpha = the (k+1)-th biased score (-inf when k == E)
//     threshold  every expert with s + bias > 0, at most `slots` of them (the largest s + bias); the cutoff is unused
//                and may be empty.  A token may get none.
//   weight_i = s_i / (sum over the chosen s + 1e-20) * scaling     (renormalize)     or     s_i * scaling
// The bias chooses, it never weighs, and it has no gradient.
//
// A NaN in a logit or the bias sorts below every number (ties by index): top_k takes such an expert only when fewer
// than k others are left, and its NaN weight then reaches the loss, where the step is found out as non-finite;
// threshold never takes it.
//
// Shapes: logits [N,E] F32, bias [E] F32, index [N,slots] I32 (-1: unused slot, always last), weight, score [N,slots]
// F32 (0 in unused slots), cutoff [N] F32, load [E] I32 (added to: tokens per expert).  valid [N] U8 or empty: a token
// with 0 is routed nowhere (all slots -1), and counted nowhere; its cutoff is NaN, which balancing counts nowhere too.
//
// Backward (over dweight [N,slots]) overwrites dlogits [N,E]: renormalised  ds_j = scaling (dw_j - sum_i dw_i s_i/S) /
// S, plain ds_j = scaling dw_j;  dlogit = ds s (1-s) on the chosen, 0 elsewhere.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

struct Routing {
  int64_t experts = 0;
  int64_t k = 0;      // experts per token (threshold: the mean aimed at)
  int64_t slots = 0;  // k for top_k; the cap for threshold
  bool threshold = false;
  bool renormalize = true;
  float scaling = 1.f;
};

void route_forward(Stream& s, const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid = {});
void route_backward(Stream& s, const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score);

// Auxiliary load-balancing loss (Switch form on normalised sigmoid scores), for comparison with bias-only methods:
//   L = coefficient * E * sum_e f_e P_e,   f_e = load_e / (N k),   P_e = mean_n s_ne / sum_j s_nj
// Adds scale * dL/dlogits to dlogits (f is a constant) and returns L through loss[0] (F32, added to).  N, the mean and
// the gradient leave out tokens that are not valid.
void aux_loss(Stream& s, float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits,
              Tensor load_of_batch, int64_t k, Tensor valid = {});

}  // namespace kestrel
