// The CPU side of kernels/attn_res.  Shapes as in attn_res.h, checked by the caller.
//
// Backward works on pieces of kRowsPerPiece tokens (kernels/norm/rows.h).  Each piece owns one row of `scratch`
// [row_pieces(N), width], laid out as  du [D] | b [S] | l [S] (mix_scratch_width), for a site followed by
// dout_norm [D] | dh [D] (site_scratch_width).
#pragma once

#include <vector>

#include "kernels/attn_res/attn_res.h"

namespace kestrel::cpu {

constexpr int64_t mix_scratch_width(int64_t S, int64_t D) {
  return D + 2 * S;
}
constexpr int64_t site_scratch_width(int64_t S, int64_t D) {
  return mix_scratch_width(S, D) + 2 * D;
}

// What a mix reads: its sources, and u = g * p [D] folded once per call.
struct Mix {
  std::vector<Tensor> sources;
  const float* u;
  Tensor alpha, rstd;
};

void fold_query(float* u, const float* norm_weight, const float* query, int64_t D);
// dg += p * du, dp += g * du with du = the sum of all pieces' du; total [D] is scratch.
void unfold_query(float* dnorm_weight, float* dquery, const float* norm_weight, const float* query, int64_t D,
                  const Tensor& scratch, float* total);

void attn_res_forward(const Mix& mix, const Tensor& y, float eps);
void attn_res_backward(const Mix& mix, const std::vector<Tensor>& dsources, const Tensor& dy, const Tensor& scratch);

// A mix without sources stands for "the site does not mix".
void residual_site_forward(const ResidualSite& site, const Mix& mix);
void residual_site_backward(const ResidualSite& site, const Mix& mix, const std::vector<Tensor>& dsources,
                            const ResidualSiteGrads& grads, const Tensor& dy, const Tensor& scratch);
void recompute_h(const Mix& mix, const Tensor& h);
void recompute_y(const Tensor& y, const Tensor& h, const Tensor& out_norm, const Tensor& rstd);

}  // namespace kestrel::cpu
