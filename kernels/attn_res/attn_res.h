// Attention over depth (Attention Residuals), and the site in front of every sublayer.
//
//   attn_res   over sources v_0 .. v_{S-1}, each [N,D], per token:
//              r_j = (mean(v_j^2) + eps)^(-1/2),  l_j = r_j <g*p, v_j>,  a = softmax_j(l),  y = sum_j a_j v_j   (no
//              1/sqrt(D))
//   Parameters: g = norm weight [D] F32, p = depth query [1,D] F32.  Saved: alpha, rstd [N,S] F32.
//   Backward, with b_j = <dy, v_j>, dl_j = a_j (b_j - sum_i a_i b_i):
//              dv_j += a_j dy + dl_j r_j (g*p - l_j r_j v_j / D),   dg += p * du,  dp += g * du,  du = sum_tokens sum_j
//              dl_j r_j v_j
//
//   residual_site   what the model calls before each sublayer and before the head: residual add, mix, norm in one pass.
//              prefix = prefix_in + delta          (either may be missing)
//              h = mix over completed rows and prefix (or just prefix, when there are no completed rows or no mix
//              parameters) y = RMSNorm(h; out_norm)
//
// Gradients of sources are accumulated (+=) in fp32: an early row collects up to two contributions per later layer.
// Source: Attention Residuals, arXiv 2603.15031; Kimi K3 report, section 2.2.
#pragma once

#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

void attn_res_forward(Stream& s, Tensor y, Tensor alpha, Tensor rstd, const std::vector<Tensor>& sources,
                      Tensor norm_weight, Tensor query, float eps);
void attn_res_backward(Stream& s, const std::vector<Tensor>& dsources, Tensor dnorm_weight, Tensor dquery, Tensor dy,
                       const std::vector<Tensor>& sources, Tensor alpha, Tensor rstd, Tensor norm_weight, Tensor query);

struct ResidualSite {
  // What is mixed
  std::vector<Tensor> completed;  // finished block rows, each [N,D]
  Tensor prefix_in;               // running sum of the open block [N,D], or empty
  Tensor delta;                   // output of the previous sublayer [N,D], or empty
  // Parameters, F32
  Tensor mix_norm, mix_query;  // [D], [1,D]; empty: no mix (standard residual; the first site)
  Tensor out_norm;             // [D]
  float eps = 1e-5f;
  // Results.  `prefix` is written when both prefix_in and delta are given; otherwise it must be that one tensor.
  Tensor prefix;           // [N,D]
  Tensor h;                // [N,D] mixed vector; scratch unless kept for backward
  Tensor y;                // [N,D] normalised
  Tensor alpha, mix_rstd;  // [N, completed+1] F32; unused without a mix
  Tensor rstd;             // [N] F32 of the output norm

  bool mixes() const { return static_cast<bool>(mix_norm) && !completed.empty(); }
};

struct ResidualSiteGrads {
  std::vector<Tensor> dcompleted;  // F32 [N,D] each, added to
  Tensor dprefix;  // F32 [N,D], added to (the gradient of `prefix`, hence of prefix_in and of delta alike)
  Tensor dmix_norm, dmix_query, dout_norm;  // F32, added to
};

void residual_site_forward(Stream& s, ResidualSite& site);
// Needs site.prefix, completed, alpha, mix_rstd, rstd and h (recompute h with residual_site_recompute_h when it was not
// kept).
void residual_site_backward(Stream& s, const ResidualSite& site, const ResidualSiteGrads& grads, Tensor dy);
// h = sum_j alpha_j v_j from the saved alpha: the same bits as forward.
void residual_site_recompute_h(Stream& s, const ResidualSite& site);
// y = out_norm * h * rstd from the saved rstd: the same bits as forward.
void residual_site_recompute_y(Stream& s, const ResidualSite& site);

}  // namespace kestrel
