#include "tests/kernels/attn_res/site.h"

namespace kestrel::test {
namespace {

constexpr float kEps = 1e-2f;  // large enough to matter

// A site with memory of its own: R completed rows, and whichever of prefix_in and delta are wanted.
struct Site {
  int64_t N, D;
  CpuStream s;
  Buffer rows, d_rows, prefix_in, delta, sum, d_prefix, g, q, w, dg, dq, dw, h, y, dy, alpha, mix_rstd, rstd;
  ResidualSite site;
  ResidualSiteGrads grads;

  Site(int64_t n, int64_t d, int64_t R, bool has_prefix_in, bool has_delta, bool has_mix = true)
      : N(n),
        D(d),
        rows({R, N, D}),
        d_rows({R, N, D}),
        prefix_in({N, D}),
        delta({N, D}),
        sum({N, D}),
        d_prefix({N, D}),
        g({D}),
        q({1, D}),
        w({D}),
        dg({D}),
        dq({1, D}),
        dw({D}),
        h({N, D}),
        y({N, D}),
        dy({N, D}),
        alpha({N, R + (has_prefix_in || has_delta)}),
        mix_rstd({N, R + (has_prefix_in || has_delta)}),
        rstd({N}) {
    rows.normal(1), prefix_in.normal(2), delta.normal(3), g.normal(4, 0.2f, 1.f), q.normal(5, 0.5f);
    w.normal(6, 0.2f, 1.f), dy.normal(7);
    d_rows.zero(), d_prefix.zero(), dg.zero(), dq.zero(), dw.zero();
    for (int64_t j = 0; j < R; ++j) {
      site.completed.push_back((*rows)[j]);
      grads.dcompleted.push_back((*d_rows)[j]);
    }
    if (has_prefix_in) site.prefix = site.prefix_in = prefix_in;
    if (has_delta) site.prefix = site.delta = delta;
    if (has_prefix_in && has_delta) site.prefix = sum;
    if (has_mix) {
      site.mix_norm = g, site.mix_query = q, site.h = h, site.alpha = alpha, site.mix_rstd = mix_rstd;
      grads.dmix_norm = dg, grads.dmix_query = dq;
    }
    site.out_norm = w, site.eps = kEps, site.y = y, site.rstd = rstd;
    if (site.prefix) grads.dprefix = d_prefix;
    grads.dout_norm = dw;
  }
  void forward() { residual_site_forward(s, site); }
  void backward() { residual_site_backward(s, site, grads, dy); }
};

struct Case {
  int64_t N, D, R;
  bool prefix_in, delta, mix;
};
class SiteCases : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Kinds, SiteCases,
    testing::Values(Case{5, 13, 3, true, true, true},    // inside a block
                    Case{4, 7, 2, false, true, true},    // first sublayer of a block
                    Case{3, 72, 9, true, false, true},   // nothing to add
                    Case{37, 3, 4, false, false, true},  // completed rows alone
                    Case{3, 5, 1, false, false, true},   // one row alone: alpha = 1
                    Case{1, 1, 1, true, true, true},     // smallest
                    Case{5, 11, 0, true, false, true},   // the first site: parameters, but nothing to choose from
                    Case{35, 6, 0, true, true, false},   // standard residual
                    Case{2, 9, 2, true, true, false}));  // completed rows, no parameters: not looked at

TEST_P(SiteCases, AgreesWithDifferences) {
  const Case p = GetParam();
  Site t(p.N, p.D, p.R, p.prefix_in, p.delta, p.mix);
  const bool mixes = p.mix && p.R > 0, has_prefix = p.prefix_in || p.delta;
  EXPECT_EQ(t.site.mixes(), mixes);
  t.forward();
  t.backward();

  std::vector<Doubles> v;
  for (const Tensor& row : t.site.completed) v.push_back(doubles(row));
  Doubles x = p.prefix_in ? doubles(t.prefix_in) : Doubles{}, d = p.delta ? doubles(t.delta) : Doubles{};
  Doubles vg = doubles(t.g), vq = doubles(t.q), vw = doubles(t.w);
  const Doubles vdy = doubles(t.dy);
  auto prefix = [&] {
    Doubles sum = p.prefix_in ? x : d;
    for (size_t i = 0; p.prefix_in && p.delta && i < sum.size(); ++i) sum[i] += d[i];
    return sum;
  };
  auto forward = [&] {
    std::vector<Doubles> sources = v;
    if (has_prefix) sources.push_back(prefix());
    return naive_norm(mixes ? naive_mix(sources, vg, vq, kEps) : prefix(), vw, kEps);
  };
  auto loss = [&] { return inner(forward(), vdy); };
  // As in the tests of the mix and of the norm: alpha is good to 1e-6; differences cancel by a small factor, with one
  // column (dx = r u eps/(x^2 + eps)) by about a hundred.
  const double out = 5e-6, grad = p.D == 1 ? 1e-4 : 3e-5;
  EXPECT_LE(relative_error(t.y, forward()), out);
  EXPECT_LE(relative_error(t.dw, differences(vw, loss)), grad);
  if (has_prefix) {
    EXPECT_LE(relative_error(t.site.prefix, prefix()), 1e-7);
    // The gradient of the prefix is that of either summand.
    EXPECT_LE(relative_error(t.d_prefix, differences(p.prefix_in ? x : d, loss)), grad);
  }
  if (mixes) {
    for (size_t j = 0; j < v.size(); ++j) {
      EXPECT_LE(relative_error(t.grads.dcompleted[j], differences(v[j], loss)), grad) << j;
    }
    if (t.alpha->cols() > 1) {
      EXPECT_LE(relative_error(t.dg, differences(vg, loss)), grad);
      EXPECT_LE(relative_error(t.dq, differences(vq, loss)), grad);
    } else {
      for (double zero : doubles(t.dq)) EXPECT_EQ(zero, 0.0);
    }
  } else {  // h and the parameters of a mix that does not take place are left alone
    for (double poison : doubles(t.h)) EXPECT_TRUE(std::isnan(poison));
    for (double zero : doubles(t.dq)) EXPECT_EQ(zero, 0.0);
    for (double zero : doubles(t.d_rows)) EXPECT_EQ(zero, 0.0);
  }
}

TEST(ResidualSite, FusedGivesTheValuesOfItsParts) {
  Site t(6, 24, 3, true, true);
  t.forward();
  std::vector<Tensor> sources = t.site.completed;
  sources.push_back(t.sum);
  Buffer h({6, 24}), alpha({6, 4}), rstd({6, 4});
  attn_res_forward(t.s, h, alpha, rstd, sources, t.g, t.q, kEps);
  EXPECT_TRUE(same_bits(h, t.h) && same_bits(alpha, t.alpha) && same_bits(rstd, t.mix_rstd));  // the same row kernels
  EXPECT_LE(relative_error(t.y, naive_norm(doubles(h), doubles(t.w), kEps)), 1e-6);            // a few roundings
}

TEST(ResidualSite, RecomputedTensorsHaveTheBitsOfForward) {
  for (const int64_t D : {24, 37, 72}) {
    Site t(41, D, 3, true, true);
    t.forward();
    Buffer h({41, D}), y({41, D});
    ResidualSite again = t.site;
    again.h = h, again.y = y, again.prefix_in = {}, again.delta = {};  // neither is kept for backward
    residual_site_recompute_h(t.s, again);
    residual_site_recompute_y(t.s, again);
    EXPECT_TRUE(same_bits(h, t.h) && same_bits(y, t.y));

    Site plain(41, D, 0, true, true, false);
    plain.forward();
    Buffer plain_y({41, D});
    again = plain.site;
    again.y = plain_y;
    residual_site_recompute_h(plain.s, again);  // nothing to do
    residual_site_recompute_y(plain.s, again);
    EXPECT_TRUE(same_bits(plain_y, plain.y));
  }
}

TEST(ResidualSite, ForwardMayPutHInYAndTheSumInPlace) {
  Site kept(9, 37, 2, true, true), dropped(9, 37, 2, true, true);
  dropped.site.h = dropped.y;
  dropped.site.prefix = dropped.prefix_in;
  kept.forward();
  dropped.forward();
  EXPECT_TRUE(same_bits(kept.y, dropped.y) && same_bits(kept.sum, dropped.prefix_in));
  dropped.site.h = dropped.h;
  residual_site_recompute_h(dropped.s, dropped.site);
  kept.backward();
  dropped.backward();
  EXPECT_TRUE(same_bits(kept.d_rows, dropped.d_rows) && same_bits(kept.d_prefix, dropped.d_prefix));
  EXPECT_TRUE(same_bits(kept.dw, dropped.dw) && same_bits(kept.dq, dropped.dq));
}

TEST(ResidualSite, EveryGradientIsAddedTo) {
  for (const int64_t R : {0, 2}) {
    Site fresh(5, 12, R, true, true), used(5, 12, R, true, true);
    used.d_rows.normal(20), used.d_prefix.normal(21), used.dg.normal(22), used.dq.normal(23), used.dw.normal(24);
    auto all = [](Site& t) {
      Doubles v;
      for (const Tensor& x : {*t.d_rows, *t.d_prefix, *t.dg, *t.dq, *t.dw}) {
        const Doubles part = doubles(x);
        v.insert(v.end(), part.begin(), part.end());
      }
      return v;
    };
    Doubles want = all(used);
    fresh.forward(), fresh.backward(), used.forward(), used.backward();
    const Doubles added = all(fresh);
    for (size_t i = 0; i < want.size(); ++i) want[i] += added[i];
    EXPECT_LE(relative_error(all(used), want), 3e-7);  // fp32 additions, some of them fused
  }
}

// Two sites in a row, as in a model: the second adds y of the first to the stream, and both read completed row 0.
TEST(ResidualSite, AnEarlyRowCollectsFromEveryLaterSite) {
  const int64_t N = 4, D = 9;
  Site first(N, D, 1, true, false), second(N, D, 1, true, true);
  second.site.completed = first.site.completed;
  second.site.prefix_in = first.site.prefix;
  second.site.delta = first.site.y;
  first.forward(), second.forward();
  // Backward: the gradient of the second prefix is that of the first prefix and of y alike.
  first.grads.dprefix = second.grads.dprefix;
  second.grads.dcompleted = first.grads.dcompleted;
  residual_site_backward(second.s, second.site, second.grads, second.dy);
  const Doubles from_second_alone = doubles(first.grads.dcompleted[0]);
  Buffer dy({N, D});
  dy.copy(second.d_prefix);
  residual_site_backward(first.s, first.site, first.grads, dy);

  Doubles row = doubles(first.site.completed[0]), x = doubles(first.prefix_in);
  const Doubles g = doubles(first.g), q = doubles(first.q), w = doubles(first.w), vdy = doubles(second.dy);
  auto loss = [&] {
    Doubles sum = naive_norm(naive_mix({row, x}, g, q, kEps), w, kEps);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
    return inner(naive_norm(naive_mix({row, sum}, g, q, kEps), w, kEps), vdy);
  };
  const Doubles want = differences(row, loss);
  EXPECT_LE(relative_error(first.grads.dcompleted[0], want), 3e-5);  // two sites, bounds as above
  EXPECT_GE(relative_error(from_second_alone, want), 1e-2);          // dropping a contribution would show
  EXPECT_LE(relative_error(second.d_prefix, differences(x, loss)), 3e-5);
}

TEST(ResidualSite, ZeroQueryIsAPreNormResidualNetwork) {
  // h = (sum of rows) / S, and the norm does not see the factor when eps is negligible.
  const int64_t N = 5, D = 24;
  Site t(N, D, 3, true, true);
  t.q.zero();
  t.site.eps = 1e-12f;
  t.forward();
  t.backward();
  Doubles total = doubles(t.sum);
  for (const Tensor& row : t.site.completed) {
    const Doubles v = doubles(row);
    for (size_t i = 0; i < v.size(); ++i) total[i] += v[i];
  }
  EXPECT_LE(relative_error(t.y, naive_norm(total, doubles(t.w), 1e-12)), 1e-6);  // fp32 sum of four rows
  for (int64_t i = 0; i < N * 4; ++i) EXPECT_EQ(t.alpha[i], 0.25f);
  double moved = 0;
  for (int64_t c = 0; c < D; ++c) {
    EXPECT_EQ(std::bit_cast<uint32_t>(t.dg[c]), 0u);
    moved = std::max(moved, std::fabs(static_cast<double>(t.dq[c])));
  }
  EXPECT_GT(moved, 0);
}

TEST(ResidualSite, BitsDoNotDependOnTheThreadCount) {
  for (const bool mix : {true, false}) {
    Site one(101, 37, 3, true, true, mix), two(101, 37, 3, true, true, mix);
    with_threads(1, [&] { one.forward(), one.backward(); });
    with_threads(2, [&] { two.forward(), two.backward(); });
    EXPECT_TRUE(same_bits(one.y, two.y) && same_bits(one.sum, two.sum) && same_bits(one.d_rows, two.d_rows));
    EXPECT_TRUE(same_bits(one.d_prefix, two.d_prefix) && same_bits(one.dg, two.dg));
    EXPECT_TRUE(same_bits(one.dq, two.dq) && same_bits(one.dw, two.dw));
  }
}

TEST(ResidualSite, PlanningTouchesNothingAndCountsTheScratch) {
  Site t(70, 16, 2, true, true);
  Arena planner = Arena::planner(Device::cpu);
  Stream s(planner);
  residual_site_forward(s, t.site);
  residual_site_recompute_h(s, t.site);
  residual_site_recompute_y(s, t.site);
  residual_site_backward(s, t.site, t.grads, t.dy);
  for (double poison : doubles(t.y)) EXPECT_TRUE(std::isnan(poison));
  for (double zero : doubles(t.dw)) EXPECT_EQ(zero, 0.0);
  EXPECT_GE(planner.peak(), 3 * (3 * 16 + 2 * 3) * 4);  // three pieces of 3 D + 2 S floats

  const int64_t planned = planner.peak();
  t.forward();
  t.backward();
  EXPECT_EQ(t.s.arena().peak(), planned);
}

TEST(ResidualSite, MistakesOfTheCallerAreRefused) {
  Site nothing(3, 8, 0, false, false), no_parameters(3, 8, 2, false, false, false);
  EXPECT_THROW(nothing.forward(), ContractError);
  EXPECT_THROW(no_parameters.forward(), ContractError);
  Site other(3, 8, 2, true, false);
  other.site.prefix = other.sum;  // only prefix_in is given, so prefix must be it
  EXPECT_THROW(other.forward(), ContractError);
  Site shared(3, 8, 2, true, true);
  shared.site.h = shared.site.prefix;
  EXPECT_THROW(shared.forward(), ContractError);
  Site narrow(3, 8, 2, true, true);
  narrow.site.alpha = narrow.alpha->columns(0, 2);
  EXPECT_THROW(narrow.forward(), ContractError);
  Site missing(3, 8, 2, true, true);
  missing.forward();
  missing.grads.dcompleted.pop_back();
  EXPECT_THROW(missing.backward(), ContractError);
}

TEST(ResidualSite, NoTokensIsNothingToDo) {
  Site t(0, 8, 2, true, true);
  t.forward();
  t.backward();
  for (double zero : doubles(t.dw)) EXPECT_EQ(zero, 0.0);
}

}  // namespace
}  // namespace kestrel::test
