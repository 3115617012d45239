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
//              prefix = prefix_in + delta          (either may be missing, or both: see ResidualSite)
//              h = mix over completed rows, in order, and then prefix (or just prefix, when there are no completed rows
//              or no mix parameters)
//              y = RMSNorm(h; out_norm)
//
// Gradients of sources are accumulated (+=) in fp32: an early row collects up to two contributions per later layer.
// Every [N,D] and [N,S] tensor may have any ld.  S >= 1 is any number; with S = 1 alpha is 1 and the gradients of g and
// p are exactly 0.  With p = 0 alpha is exactly 1/S and the gradient of g exactly 0.  A shape, dtype or aliasing that
// does not fit is a ContractError.
// Source: Attention Residuals, arXiv 2603.15031; Kimi K3 report, section 2.2.  README.md here says what it means.
#pragma once

#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

// y is none of the sources.
void attn_res_forward(Stream& s, Tensor y, Tensor alpha, Tensor rstd, const std::vector<Tensor>& sources,
                      Tensor norm_weight, Tensor query, float eps);
// dsources[j] F32 [N,D], one per source, all different memory, added to; so are dnorm_weight and dquery.
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
  // Results.  `prefix` is written when both prefix_in and delta are given (and may be either of them: the sum is then
  // formed in place); with one of them it must be that very tensor; with neither it must be empty, and the site must
  // mix (completed rows alone).  Backward and recompute look at `prefix` only, not at prefix_in and delta.
  Tensor prefix;  // [N,D]
  // [N,D] mixed vector.  When mixes(), forward writes it and backward reads it; between the two it may be dropped and
  // rewritten by residual_site_recompute_h, so a caller that does not keep it may pass scratch, or y itself, to
  // forward. When !mixes() it is neither read nor written, whatever it is: h is prefix.
  Tensor h;
  Tensor y;                // [N,D] normalised
  Tensor alpha, mix_rstd;  // [N,S] F32, S = completed + (prefix ? 1 : 0), prefix last; unused without a mix
  Tensor rstd;             // [N] F32 of the output norm

  bool mixes() const { return static_cast<bool>(mix_norm) && !completed.empty(); }
};

struct ResidualSiteGrads {
  std::vector<Tensor> dcompleted;  // F32 [N,D] each, added to; looked at only when the site mixes
  Tensor dprefix;  // F32 [N,D], added to (the gradient of `prefix`, hence of prefix_in and of delta alike); empty when
                   // there is no prefix
  Tensor dmix_norm, dmix_query, dout_norm;  // F32, added to; the first two only when the site mixes
};

void residual_site_forward(Stream& s, ResidualSite& site);
// Needs site.prefix, completed, alpha, mix_rstd, rstd and h (recompute h with residual_site_recompute_h when it was not
// kept).
void residual_site_backward(Stream& s, const ResidualSite& site, const ResidualSiteGrads& grads, Tensor dy);
// h = sum_j alpha_j v_j from the saved alpha: the same bits as forward.  Nothing to do when the site does not mix.
void residual_site_recompute_h(Stream& s, const ResidualSite& site);
// y = out_norm * h * rstd from the saved rstd: the same bits as forward.
void residual_site_recompute_y(Stream& s, const ResidualSite& site);

}  // namespace kestrel
