// The CUDA side of attn_res.h; arguments as there, checked by the caller.  `sources` are those of the site in mixing
// order, none when it does not mix.  Backward takes its scratch from the stream and returns when the stream is only
// planning.
#pragma once

#include <vector>

#include "kernels/attn_res/attn_res.h"

namespace kestrel::cuda {

void attn_res_forward(Stream& s, Tensor y, Tensor alpha, Tensor rstd, const std::vector<Tensor>& sources,
                      Tensor norm_weight, Tensor query, float eps);
void attn_res_backward(Stream& s, const std::vector<Tensor>& dsources, Tensor dnorm_weight, Tensor dquery, Tensor dy,
                       const std::vector<Tensor>& sources, Tensor alpha, Tensor rstd, Tensor norm_weight, Tensor query);

void residual_site_forward(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources);
void residual_site_backward(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources,
                            const std::vector<Tensor>& dsources, const ResidualSiteGrads& grads, Tensor dy);
void residual_site_recompute_h(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources);
void residual_site_recompute_y(Stream& s, const ResidualSite& site);

}  // namespace kestrel::cuda
