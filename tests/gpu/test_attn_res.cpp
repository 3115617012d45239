// Attention over depth and the residual site on the GPU against the CPU.
#include <memory>

#include "gpu/support.h"
#include "kernels/attn_res/attn_res.h"

namespace kestrel::test {
namespace {

constexpr float kEps = 1e-5f;
constexpr DType kActivations[] = {DType::f32, DType::bf16};
// Gradients of parameters: sums over tokens and sources of terms of either sign, whose factor b_j - sum a b itself
// cancels by about the number of sources.
constexpr double kParameterBound = 5e-5;

using Owned = std::unique_ptr<DeviceBuffer>;
using Hosts = std::vector<std::unique_ptr<Buffer>>;

std::vector<Tensor> tensors(const std::vector<Owned>& v) {
  std::vector<Tensor> t;
  for (const Owned& b : v) t.push_back(*b);
  return t;
}
std::vector<Tensor> tensors(const Hosts& v) {
  std::vector<Tensor> t;
  for (const auto& b : v) t.push_back(*b);
  return t;
}

std::unique_ptr<Buffer> random(int64_t N, int64_t D, uint64_t seed, float std, DType t) {
  auto b = std::make_unique<Buffer>(std::initializer_list<int64_t>{N, D});
  b->normal(seed, std);
  round_to(t, *b);
  return b;
}
Owned copy(const Tensor& host, DType t, int64_t left = 0, int64_t right = 0) {
  return std::make_unique<DeviceBuffer>(host, t, left, right);
}
Owned fresh(int64_t N, int64_t D, DType t, int64_t left = 0, int64_t right = 0) {
  return std::make_unique<DeviceBuffer>(std::initializer_list<int64_t>{N, D}, t, left, right);
}
// What is on the device, as an F32 host tensor.
std::unique_ptr<Buffer> host_copy(const DeviceBuffer& d) {
  auto b = std::make_unique<Buffer>(std::initializer_list<int64_t>{d->rows(), d->cols()});
  const std::vector<float> v = d.values();
  std::copy(v.begin(), v.end(), b->f());
  return b;
}

enum class Prefix { none, given, sum };
struct Case {
  int64_t N, D;
  int completed;
  Prefix prefix;
  int64_t left, right;  // padding columns beside every [N,D] matrix
};
// Every block size of both group kernels and their edges, the loop kernel for ragged, unaligned and very wide rows and
// for more than 64 sources; one source alone; sources that fill a batch of four, or not; no mix; many pieces of tokens.
constexpr Case kCases[] = {
    {1, 1, 2, Prefix::sum, 0, 0},      {3, 7, 2, Prefix::sum, 0, 0},      {5, 64, 1, Prefix::none, 0, 0},
    {5, 64, 1, Prefix::given, 8, 8},   {33, 136, 3, Prefix::sum, 8, 0},   {33, 136, 3, Prefix::sum, 3, 2},
    {7, 1024, 4, Prefix::sum, 0, 0},   {6, 1032, 3, Prefix::none, 0, 0},  {9, 2048, 6, Prefix::sum, 0, 0},
    {2000, 264, 5, Prefix::sum, 0, 0}, {17, 520, 8, Prefix::given, 0, 0}, {3, 2056, 7, Prefix::sum, 0, 0},
    {3, 4096, 4, Prefix::sum, 0, 0},   {5, 7168, 9, Prefix::sum, 0, 0},   {2, 8192, 3, Prefix::sum, 0, 0},
    {3, 8200, 2, Prefix::sum, 0, 0},   {4, 24, 63, Prefix::sum, 0, 0},    {4, 24, 70, Prefix::sum, 0, 0},
    {9, 136, 0, Prefix::sum, 0, 8},    {9, 131, 0, Prefix::sum, 0, 0},    {9, 136, 0, Prefix::given, 0, 0},
    {0, 64, 2, Prefix::sum, 0, 0}};

std::string name(const Case& c, DType t) {
  const char* prefix = c.prefix == Prefix::none ? "none" : c.prefix == Prefix::given ? "given" : "a sum";
  return text(name_of(t), " N ", c.N, " D ", c.D, " completed ", c.completed, ", prefix ", prefix, ", padded ", c.left,
              "+", c.right);
}

// One site on host and device, its inputs the same numbers.
struct Sites {
  Case c;
  DType t;
  int64_t S;
  Hosts completed;
  std::unique_ptr<Buffer> prefix_in, delta, prefix, g, q, w, h, y, alpha, mix_rstd, rstd, dy;
  std::vector<Owned> xcompleted;
  Owned xprefix_in, xdelta, xprefix, xg, xq, xw, xh, xy, xalpha, xmix_rstd, xrstd, xdy;
  ResidualSite host, device;

  bool mixes() const { return c.completed > 0; }
  bool has_prefix() const { return c.prefix != Prefix::none; }

  Sites(const Case& a, DType dtype) : c(a), t(dtype), S(a.completed + (a.prefix == Prefix::none ? 0 : 1)) {
    const int64_t N = c.N, D = c.D;
    for (int j = 0; j < c.completed; ++j) {
      completed.push_back(random(N, D, 10 + static_cast<uint64_t>(j), 1.f + 0.1f * static_cast<float>(j), t));
      xcompleted.push_back(copy(*completed.back(), t, c.left, c.right));
    }
    g = random(1, D, 1, 0.3f, DType::f32);
    for (int64_t i = 0; i < D; ++i) (*g)[i] += 1.f;
    q = random(1, D, 2, 0.7f / std::sqrt(static_cast<float>(D)) * 4.f, DType::f32);
    w = random(1, D, 3, 0.5f, DType::f32);
    dy = random(N, D, 4, 1.f, t);
    xg = copy(*g, DType::f32), xq = copy(*q, DType::f32), xw = copy(*w, DType::f32),
    xdy = copy(*dy, t, c.left, c.right);
    h = random(N, D, 5, 1.f, t), y = random(N, D, 5, 1.f, t);
    alpha = random(N, S, 5, 1.f, DType::f32), mix_rstd = random(N, S, 5, 1.f, DType::f32);
    rstd = random(1, N, 5, 1.f, DType::f32);
    xh = fresh(N, D, t, c.left, c.right), xy = fresh(N, D, t, c.left, c.right);
    xalpha = fresh(N, S, DType::f32, 0, 1), xmix_rstd = fresh(N, S, DType::f32, 2, 0), xrstd = fresh(1, N, DType::f32);
    if (has_prefix()) set_prefix();
    fill(host, tensors(completed), *g, *q, *w, *h, *y, *alpha, *mix_rstd, *rstd);
    fill(device, tensors(xcompleted), *xg, *xq, *xw, *xh, *xy, *xalpha, *xmix_rstd, *xrstd);
  }

 private:
  void set_prefix() {
    prefix = random(c.N, c.D, 6, 2.f, t);
    if (c.prefix == Prefix::given) {
      xprefix = copy(*prefix, t, c.left, c.right);
      device.prefix_in = device.prefix = *xprefix;
    } else {
      prefix_in = random(c.N, c.D, 7, 2.f, t), delta = random(c.N, c.D, 8, 1.f, t);
      // The host is given the sum as the device must round it.
      for (int64_t i = 0; i < c.N * c.D; ++i) (*prefix)[i] = rounded((*prefix_in)[i] + (*delta)[i], t);
      xprefix_in = copy(*prefix_in, t, c.left, c.right), xdelta = copy(*delta, t, c.left, c.right);
      xprefix = fresh(c.N, c.D, t, c.left, c.right);
      device.prefix_in = *xprefix_in, device.delta = *xdelta, device.prefix = *xprefix;
    }
    host.prefix_in = host.prefix = *prefix;
  }
  void fill(ResidualSite& site, std::vector<Tensor> rows, Tensor norm, Tensor query, Tensor out, Tensor mixed,
            Tensor norm_out, Tensor weights, Tensor source_rstd, Tensor out_rstd) const {
    site.completed = std::move(rows);
    if (mixes()) site.mix_norm = norm.view({c.D}), site.mix_query = query;
    site.out_norm = out.view({c.D});
    site.eps = kEps;
    site.h = mixed, site.y = norm_out, site.alpha = weights, site.mix_rstd = source_rstd;
    site.rstd = out_rstd.view({c.N});
  }
};

TEST(GpuResidualSite, Forward) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(name(c, t));
      Sites x(c, t);
      residual_site_forward(cpu, x.host);
      cuda.run([&](Stream& s) { residual_site_forward(s, x.device); });
      if (x.has_prefix()) expect_close("prefix", *x.xprefix, *x.prefix, 0.);  // one addition, rounded alike
      if (x.mixes()) {
        // Logits of a few units: their F32 error is that of alpha.
        expect_close("alpha", *x.xalpha, *x.alpha, 1e-5);
        expect_close("mix_rstd", *x.xmix_rstd, *x.mix_rstd, 1e-6);
        expect_close("h", *x.xh, *x.h, tolerance(t));
      }
      expect_close("y", *x.xy, *x.y, tolerance(t));
      // The device takes the norm of the rounded h.
      expect_close("rstd", *x.xrstd, *x.rstd, t == DType::bf16 && x.mixes() ? 4e-3 : 1e-5);
    }
  }
}

TEST(GpuResidualSite, RecomputeGivesTheSameBits) {
  CudaStream cuda;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(name(c, t));
      Sites x(c, t);
      DeviceBuffer h({c.N, c.D}, t, c.left, c.right), y({c.N, c.D}, t, c.left, c.right);
      DeviceBuffer y2({c.N, c.D}, t, c.left, c.right);
      ResidualSite again = x.device, no_h = x.device;
      cuda.run([&](Stream& s) {
        residual_site_forward(s, x.device);
        again.h = h;
        residual_site_recompute_h(s, again);
        again.y = y;
        residual_site_recompute_y(s, again);
        // A second forward pass, h not kept; the sum may have been formed in place.
        no_h.prefix_in = no_h.prefix;
        no_h.delta = Tensor();
        no_h.y = no_h.h = y2;
        residual_site_forward(s, no_h);
      });
      if (x.mixes()) expect_same_bits("h", h, *x.xh);
      expect_same_bits("y", y, *x.xy);
      expect_same_bits("y without h", y2, *x.xy);
    }
  }
}

TEST(GpuResidualSite, PrefixInPlace) {
  CudaStream cuda;
  for (const Case& c : kCases) {
    if (c.prefix != Prefix::sum) continue;
    SCOPED_TRACE(name(c, DType::bf16));
    Sites a(c, DType::bf16), b(c, DType::bf16), d(c, DType::bf16);
    b.device.prefix = *b.xprefix_in;
    d.device.prefix = *d.xdelta;
    cuda.run([&](Stream& s) {
      residual_site_forward(s, a.device);
      residual_site_forward(s, b.device);
      residual_site_forward(s, d.device);
    });
    expect_same_bits("prefix over prefix_in", *b.xprefix_in, *a.xprefix);
    expect_same_bits("prefix over delta", *d.xdelta, *a.xprefix);
    expect_same_bits("y over prefix_in", *b.xy, *a.xy);
    expect_same_bits("y over delta", *d.xy, *a.xy);
  }
}

// Gradients of one site, started from the same random numbers.
struct Grads {
  Hosts dcompleted;
  std::unique_ptr<Buffer> dprefix, dg, dq, dw;
  std::vector<Owned> xdcompleted;
  Owned xdprefix, xdg, xdq, xdw;
  ResidualSiteGrads host, device;

  explicit Grads(const Sites& x) {
    const Case& c = x.c;
    for (int j = 0; j < c.completed; ++j) {
      dcompleted.push_back(random(c.N, c.D, 30 + static_cast<uint64_t>(j), 1.f, DType::f32));
      xdcompleted.push_back(copy(*dcompleted.back(), DType::f32, c.left, c.right));
    }
    dg = random(1, c.D, 21, 1.f, DType::f32), dq = random(1, c.D, 22, 1.f, DType::f32);
    dw = random(1, c.D, 23, 1.f, DType::f32);
    xdg = copy(*dg, DType::f32), xdq = copy(*dq, DType::f32), xdw = copy(*dw, DType::f32);
    host = {tensors(dcompleted), {}, (*dg)->view({c.D}), *dq, (*dw)->view({c.D})};
    device = {tensors(xdcompleted), {}, (*xdg)->view({c.D}), *xdq, (*xdw)->view({c.D})};
    if (!x.has_prefix()) return;
    dprefix = random(c.N, c.D, 24, 1.f, DType::f32);
    xdprefix = copy(*dprefix, DType::f32, c.left, c.right);
    host.dprefix = *dprefix, device.dprefix = *xdprefix;
  }
};

TEST(GpuResidualSite, Backward) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(name(c, t));
      Sites x(c, t);
      Grads d(x), d2(x);
      cuda.run([&](Stream& s) { residual_site_forward(s, x.device); });
      cuda.run([&](Stream& s) { residual_site_backward(s, x.device, d.device, *x.xdy); });
      cuda.run([&](Stream& s) { residual_site_backward(s, x.device, d2.device, *x.xdy); });
      // The host goes back from what the device kept, so that only the arithmetic of backward differs.
      if (x.mixes()) {
        x.h = host_copy(*x.xh), x.alpha = host_copy(*x.xalpha), x.mix_rstd = host_copy(*x.xmix_rstd);
        x.host.h = *x.h, x.host.alpha = *x.alpha, x.host.mix_rstd = *x.mix_rstd;
      }
      x.rstd = host_copy(*x.xrstd);
      x.host.rstd = (*x.rstd)->view({c.N});
      residual_site_backward(cpu, x.host, d.host, *x.dy);
      for (size_t j = 0; j < d.dcompleted.size(); ++j) {
        expect_close(text("dcompleted ", j).c_str(), *d.xdcompleted[j], *d.dcompleted[j], tolerance(DType::f32));
        expect_same_bits("dcompleted of two runs", *d.xdcompleted[j], *d2.xdcompleted[j]);
      }
      if (x.has_prefix()) expect_close("dprefix", *d.xdprefix, *d.dprefix, tolerance(DType::f32));
      expect_close("dmix_norm", *d.xdg, *d.dg, kParameterBound);
      expect_close("dmix_query", *d.xdq, *d.dq, kParameterBound);
      expect_close("dout_norm", *d.xdw, *d.dw, kParameterBound);
      expect_same_bits("dmix_query of two runs", *d.xdq, *d2.xdq);
      expect_same_bits("dout_norm of two runs", *d.xdw, *d2.xdw);
    }
  }
}

TEST(GpuAttnRes, ForwardAndBackward) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      if (c.completed == 0) continue;
      SCOPED_TRACE(name(c, t));
      Sites x(c, t);
      Grads d(x);
      const std::vector<Tensor> host = tensors(x.completed), device = tensors(x.xcompleted);
      const int64_t S = c.completed;
      Buffer alpha({c.N, S}), rstd({c.N, S}), y({c.N, c.D});
      DeviceBuffer xalpha({c.N, S}), xrstd({c.N, S}), xy({c.N, c.D}, t, c.left, c.right);
      const Tensor g = x.host.mix_norm, xg = x.device.mix_norm;
      attn_res_forward(cpu, y, alpha, rstd, host, g, *x.q, kEps);
      attn_res_backward(cpu, d.host.dcompleted, d.host.dmix_norm, *d.dq, *x.dy, host, alpha, rstd, g, *x.q);
      cuda.run([&](Stream& s) { attn_res_forward(s, xy, xalpha, xrstd, device, xg, *x.xq, kEps); });
      cuda.run([&](Stream& s) {
        attn_res_backward(s, d.device.dcompleted, d.device.dmix_norm, *d.xdq, *x.xdy, device, xalpha, xrstd, xg, *x.xq);
      });
      expect_close("y", xy, y, tolerance(t));
      expect_close("alpha", xalpha, alpha, 1e-5);
      expect_close("rstd", xrstd, rstd, 1e-6);
      for (size_t j = 0; j < host.size(); ++j) {
        expect_close(text("dsource ", j).c_str(), *d.xdcompleted[j], *d.dcompleted[j], tolerance(DType::f32));
      }
      expect_close("dnorm_weight", *d.xdg, *d.dg, kParameterBound);
      expect_close("dquery", *d.xdq, *d.dq, kParameterBound);
    }
  }
}

// Exact cases: with one source alpha is 1 and nothing reaches the parameters; with a zero query alpha is 1/S.
TEST(GpuAttnRes, OneSourceAndZeroQueryAreExact) {
  CudaStream cuda;
  const int64_t N = 5, D = 136;
  for (const int64_t S : {1, 3, 5}) {
    std::vector<Owned> sources, dsources;
    for (int64_t j = 0; j < S; ++j) {
      sources.push_back(copy(*random(N, D, static_cast<uint64_t>(j), 1.f, DType::bf16), DType::bf16));
      dsources.push_back(fresh(N, D, DType::f32));
      dsources.back()->zero();
    }
    auto g = random(1, D, 40, 1.f, DType::f32), q = random(1, D, 41, S == 1 ? 1.f : 0.f, DType::f32);
    const Owned xg = copy(*g, DType::f32), xq = copy(*q, DType::f32);
    const Owned dy = copy(*random(N, D, 42, 1.f, DType::bf16), DType::bf16);
    DeviceBuffer y({N, D}, DType::bf16), alpha({N, S}), rstd({N, S}), dg({D}), dq({1, D});
    dg.zero();
    dq.zero();
    cuda.run([&](Stream& s) {
      attn_res_forward(s, y, alpha, rstd, tensors(sources), (*xg)->view({D}), *xq, kEps);
      attn_res_backward(s, tensors(dsources), dg, dq, *dy, tensors(sources), alpha, rstd, (*xg)->view({D}), *xq);
    });
    for (const float a : alpha.values()) EXPECT_EQ(a, 1.f / static_cast<float>(S));
    for (const float x : dg.values()) EXPECT_EQ(x, 0.f);
    if (S > 1) continue;
    for (const float x : dq.values()) EXPECT_EQ(x, 0.f);
    expect_same_bits("y of one source", y, *sources[0]);
  }
}

}  // namespace
}  // namespace kestrel::test
