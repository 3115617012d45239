#include "kernels/attn_res/attn_res.h"

#include "kernels/attn_res/attn_res_cpu.h"
#include "kernels/attn_res/attn_res_cuda.h"
#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/norm/rows.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for attn_res in this build");
}

int64_t size(const std::vector<Tensor>& v) {
  return static_cast<int64_t>(v.size());
}

void check_vector(const char* name, const Tensor& t, int64_t n) {
  KESTREL_CHECK(t.dtype == DType::f32 && t.numel() == n && t.contiguous(), name, " is ", t.describe(),
                ", expected F32 with ", n, " contiguous elements");
}

void check_rows(const char* name, const std::vector<Tensor>& v, DType dtype, int64_t N, int64_t D) {
  for (const Tensor& t : v) check_matrix(name, t, dtype, N, D);
}

void check_mix(const std::vector<Tensor>& sources, const Tensor& alpha, const Tensor& rstd, const Tensor& norm_weight,
               const Tensor& query) {
  KESTREL_CHECK(!sources.empty(), "a mix needs at least one source");
  const int64_t N = sources[0].rows(), D = sources[0].cols(), S = size(sources);
  KESTREL_CHECK(D >= 1, "a source is ", sources[0].describe(), ", expected [N,D] with D >= 1");
  check_rows("a source", sources, sources[0].dtype, N, D);
  check_matrix("alpha", alpha, DType::f32, N, S);
  check_matrix("rstd of the mix", rstd, DType::f32, N, S);
  check_vector("norm weight of the mix", norm_weight, D);
  check_vector("query", query, D);
}

void check_mix_grads(const std::vector<Tensor>& dsources, const std::vector<Tensor>& sources,
                     const Tensor& dnorm_weight, const Tensor& dquery) {
  KESTREL_CHECK(dsources.size() == sources.size(), dsources.size(), " source gradients for ", sources.size(),
                " sources");
  check_rows("a source gradient", dsources, DType::f32, sources[0].rows(), sources[0].cols());
  check_vector("gradient of the norm weight", dnorm_weight, sources[0].cols());
  check_vector("gradient of the query", dquery, sources[0].cols());
}

bool same_memory(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.ld == b.ld && a.rows() == b.rows() && a.cols() == b.cols();
}

// The sources of a site in mixing order; none when the site does not mix.
std::vector<Tensor> sources_of(const ResidualSite& site) {
  if (!site.mixes()) return {};
  std::vector<Tensor> v = site.completed;
  if (site.prefix) v.push_back(site.prefix);
  return v;
}

// Shapes that every residual_site function relies on.
void check_site(const ResidualSite& site, const std::vector<Tensor>& sources) {
  KESTREL_CHECK(site.prefix || site.mixes(),
                "a residual site without a prefix needs completed rows and mix parameters");
  const Tensor& x = site.prefix ? site.prefix : site.completed[0];
  KESTREL_CHECK(x.cols() >= 1, "a row of the residual stream is ", x.describe(), ", expected [N,D] with D >= 1");
  check_vector("out_norm", site.out_norm, x.cols());
  check_vector("rstd", site.rstd, x.rows());
  if (!site.mixes()) return;
  check_mix(sources, site.alpha, site.mix_rstd, site.mix_norm, site.mix_query);
  check_matrix("h", site.h, x.dtype, x.rows(), x.cols());
  for (const Tensor& v : sources) {
    KESTREL_CHECK(v.data != site.h.data || v.numel() == 0, "h shares memory with a source; it needs its own");
  }
}

void check_sum(const ResidualSite& site) {
  if (site.prefix_in && site.delta) {
    const int64_t N = site.prefix_in.rows(), D = site.prefix_in.cols();
    check_matrix("delta", site.delta, site.prefix_in.dtype, N, D);
    check_matrix("prefix", site.prefix, site.prefix_in.dtype, N, D);
  } else if (site.prefix_in || site.delta) {
    KESTREL_CHECK(same_memory(site.prefix, site.prefix_in ? site.prefix_in : site.delta),
                  "prefix must be the one given of prefix_in and delta, it is ", site.prefix.describe());
  } else {
    KESTREL_CHECK(site.prefix.empty(), "prefix is ", site.prefix.describe(),
                  ", but neither prefix_in nor delta is given");
  }
}

}  // namespace

void attn_res_forward(Stream& s, Tensor y, Tensor alpha, Tensor rstd, const std::vector<Tensor>& sources,
                      Tensor norm_weight, Tensor query, float eps) {
  const OpRange range(s, "attn_res_forward");
  check_mix(sources, alpha, rstd, norm_weight, query);
  const int64_t D = sources[0].cols();
  check_matrix("y", y, sources[0].dtype, sources[0].rows(), D);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      if (!s.planning()) cuda::attn_res_forward(s, y, alpha, rstd, sources, norm_weight, query, eps);
      return;
    }
  }
  ScratchScope scope(s);
  const Tensor u = s.temp({D});
  if (s.planning()) return;
  require_cpu(s);
  cpu::fold_query(u.f32(), norm_weight.f32(), query.f32(), D);
  cpu::attn_res_forward({sources, u.f32(), alpha, rstd}, y, eps);
}

void attn_res_backward(Stream& s, const std::vector<Tensor>& dsources, Tensor dnorm_weight, Tensor dquery, Tensor dy,
                       const std::vector<Tensor>& sources, Tensor alpha, Tensor rstd, Tensor norm_weight,
                       Tensor query) {
  const OpRange range(s, "attn_res_backward");
  check_mix(sources, alpha, rstd, norm_weight, query);
  check_mix_grads(dsources, sources, dnorm_weight, dquery);
  const int64_t N = sources[0].rows(), D = sources[0].cols();
  check_matrix("dy", dy, sources[0].dtype, N, D);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda)
      return cuda::attn_res_backward(s, dsources, dnorm_weight, dquery, dy, sources, alpha, rstd, norm_weight, query);
  }
  ScratchScope scope(s);
  const Tensor u = s.temp({D}), total = s.temp({D});
  const Tensor scratch = s.temp({cpu::row_pieces(N), cpu::mix_scratch_width(size(sources), D)});
  if (s.planning()) return;
  require_cpu(s);
  cpu::fold_query(u.f32(), norm_weight.f32(), query.f32(), D);
  cpu::attn_res_backward({sources, u.f32(), alpha, rstd}, dsources, dy, scratch);
  cpu::unfold_query(dnorm_weight.f32(), dquery.f32(), norm_weight.f32(), query.f32(), D, scratch, total.f32());
}

void residual_site_forward(Stream& s, ResidualSite& site) {
  const OpRange range(s, "residual_site_forward");
  check_sum(site);
  const std::vector<Tensor> sources = sources_of(site);
  check_site(site, sources);
  const Tensor& x = site.prefix ? site.prefix : site.completed[0];
  check_matrix("y", site.y, x.dtype, x.rows(), x.cols());
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      if (!s.planning()) cuda::residual_site_forward(s, site, sources);
      return;
    }
  }
  ScratchScope scope(s);
  const Tensor u = s.temp({x.cols()});
  if (s.planning()) return;
  require_cpu(s);
  if (site.mixes()) cpu::fold_query(u.f32(), site.mix_norm.f32(), site.mix_query.f32(), x.cols());
  cpu::residual_site_forward(site, {sources, u.f32(), site.alpha, site.mix_rstd});
}

void residual_site_backward(Stream& s, const ResidualSite& site, const ResidualSiteGrads& grads, Tensor dy) {
  const OpRange range(s, "residual_site_backward");
  const std::vector<Tensor> sources = sources_of(site);
  check_site(site, sources);
  const Tensor& x = site.prefix ? site.prefix : site.completed[0];
  const int64_t N = x.rows(), D = x.cols();
  check_matrix("dy", dy, x.dtype, N, D);
  check_vector("dout_norm", grads.dout_norm, D);
  if (site.prefix) check_matrix("dprefix", grads.dprefix, DType::f32, N, D);
  std::vector<Tensor> dsources;
  if (site.mixes()) {
    dsources = grads.dcompleted;
    if (site.prefix) dsources.push_back(grads.dprefix);
    check_mix_grads(dsources, sources, grads.dmix_norm, grads.dmix_query);
  }
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::residual_site_backward(s, site, sources, dsources, grads, dy);
  }
  ScratchScope scope(s);
  const Tensor u = s.temp({D}), total = s.temp({D});
  const Tensor scratch = s.temp({cpu::row_pieces(N), cpu::site_scratch_width(size(sources), D)});
  if (s.planning()) return;
  require_cpu(s);
  if (site.mixes()) cpu::fold_query(u.f32(), site.mix_norm.f32(), site.mix_query.f32(), D);
  cpu::residual_site_backward(site, {sources, u.f32(), site.alpha, site.mix_rstd}, dsources, grads, dy, scratch);
  if (site.mixes()) {
    cpu::unfold_query(grads.dmix_norm.f32(), grads.dmix_query.f32(), site.mix_norm.f32(), site.mix_query.f32(), D,
                      scratch, total.f32());
  }
}

void residual_site_recompute_h(Stream& s, const ResidualSite& site) {
  const OpRange range(s, "residual_site_recompute_h");
  const std::vector<Tensor> sources = sources_of(site);
  check_site(site, sources);
  if (s.planning() || !site.mixes()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::residual_site_recompute_h(s, site, sources);
  }
  require_cpu(s);
  cpu::recompute_h({sources, nullptr, site.alpha, site.mix_rstd}, site.h);
}

void residual_site_recompute_y(Stream& s, const ResidualSite& site) {
  const OpRange range(s, "residual_site_recompute_y");
  check_site(site, sources_of(site));
  const Tensor& h = site.mixes() ? site.h : site.prefix;
  check_matrix("y", site.y, h.dtype, h.rows(), h.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::residual_site_recompute_y(s, site);
  }
  require_cpu(s);
  cpu::recompute_y(site.y, h, site.out_norm, site.rstd);
}

}  // namespace kestrel
