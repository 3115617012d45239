#include "kernels/attn_res/attn_res.h"

#include "tests/kernels/attn_res/site.h"

namespace kestrel::test {
namespace {

void set(Buffer& b, std::initializer_list<double> values) {
  int64_t i = 0;
  for (double v : values) b[i++] = static_cast<float>(v);
}

// The page's golden example (D = 4, two completed rows and a prefix), values to the eight digits it prints.
struct Golden {
  CpuStream s;
  Buffer rows{{3, 4}}, g{{4}}, q{{1, 4}}, dh{{1, 4}}, h{{1, 4}}, alpha{{1, 3}}, rstd{{1, 3}};
  std::vector<Tensor> sources;
  Golden() {
    set(rows, {1, 2, 3, 4, 2, 0, -2, 1, .5, -1, 0, 1});
    set(g, {1, .5, 2, 1}), set(q, {.1, -.2, .3, .4}), set(dh, {1, 0, -1, 2});
    for (int64_t j = 0; j < 3; ++j) sources.push_back(rows->slice(j, 1));
    attn_res_forward(s, h, alpha, rstd, sources, g, q, 1e-5f);
  }
};

TEST(AttnRes, GoldenForward) {
  Golden e;
  // fp32 logits of order 1: about 1e-7; the printed values end at the eighth decimal.
  EXPECT_LE(relative_error(e.alpha, {.54798834, .11008646, .34192520}), 1e-6);
  EXPECT_LE(relative_error(e.h, {.93912386, .75405148, 1.42379209, 2.64396502}), 1e-6);
  const double logits[] = {1.20498882, -0.39999911, 0.73332681};
  for (int64_t j = 1; j < 3; ++j) {
    EXPECT_NEAR(std::log(e.alpha[j] / e.alpha[0]), logits[j] - logits[0], 1e-6);
  }
}

TEST(AttnRes, GoldenBackwardIsAddedToWhatIsThere) {
  Golden e;
  Buffer dv({3, 4}), dg({4}), dq({1, 4});
  for (int64_t i = 0; i < 12; ++i) dv[i] = 2.f;
  for (int64_t i = 0; i < 4; ++i) dg[i] = -1.f, dq[i] = 3.f;
  std::vector<Tensor> dsources;
  for (int64_t j = 0; j < 3; ++j) dsources.push_back(dv->slice(j, 1));
  attn_res_backward(e.s, dsources, dg, dq, e.dh, e.sources, e.alpha, e.rstd, e.g, e.q);
  const Doubles want_dv = {.54559374,  -.07662829, -.48333306, 1.08639827, .13057998,  -.00878296,
                           -.06909927, .26116004,  .36525733,  -.15166909, -.97195420, .52050498};
  const Doubles want_dq = {-.10990137, .76448779, 1.08546339, -.00436426};
  const Doubles want_dg = {-.01099014, -.30579512, .16281951, -.00174570};
  // What is there is a few units, so fp32 sums are good to 2e-7 or so each.
  for (size_t i = 0; i < 12; ++i) EXPECT_NEAR(dv[static_cast<int64_t>(i)], 2 + want_dv[i], 1e-6);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(dq[static_cast<int64_t>(i)], 3 + want_dq[i], 1e-6);
    EXPECT_NEAR(dg[static_cast<int64_t>(i)], -1 + want_dg[i], 1e-6);
  }
}

class AttnResGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Fixtures, AttnResGolden, testing::Values("attn_res_1", "attn_res_2", "attn_res_9"));

TEST_P(AttnResGolden, MatchesFixture) {
  const SafetensorsFile f = fixture(GetParam());
  const Tensor all = f.tensor("sources"), g = f.tensor("norm_weight"), q = f.tensor("proj_weight");
  const int64_t S = all.dim(0), N = all.dim(1), D = all.dim(2);
  CpuStream s;
  Buffer y({N, D}), alpha({N, S}), rstd({N, S}), dv({S, N, D}), dg({D}), dq({1, D});
  dv.zero(), dg.zero(), dq.zero();
  std::vector<Tensor> sources, dsources;
  for (int64_t j = 0; j < S; ++j) sources.push_back(all[j]), dsources.push_back((*dv)[j]);
  attn_res_forward(s, y, alpha, rstd, sources, g, q, 1e-5f);
  EXPECT_LE(relative_error(y, f.tensor("out")), 1e-5);  // golden bounds of the house
  attn_res_backward(s, dsources, dg, dq, f.tensor("d_out"), sources, alpha, rstd, g, q);
  EXPECT_LE(relative_error(dv, f.tensor("d_sources")), 1e-4);
  if (S == 1) {  // one source: alpha is 1 and nothing reaches the parameters, not even rounding
    for (int64_t n = 0; n < N; ++n) EXPECT_EQ(alpha[n], 1.f);
    for (int64_t c = 0; c < D; ++c) {
      EXPECT_EQ(dg[c], 0.f);
      EXPECT_EQ(dq[c], 0.f);
    }
    EXPECT_TRUE(same_bits(dv, f.tensor("d_out")));
  } else {
    EXPECT_LE(relative_error(dg, f.tensor("d_norm_weight")), 1e-4);
    EXPECT_LE(relative_error(dq, f.tensor("d_proj_weight")), 1e-4);
  }
}

struct Size {
  int64_t N, D, S;
};
class AttnResSizes : public testing::TestWithParam<Size> {};
// N = 1, D = 1, primes, D = 72 with nine rows, more tokens than one piece, N differs from S throughout.
INSTANTIATE_TEST_SUITE_P(Awkward, AttnResSizes,
                         testing::Values(Size{1, 72, 9}, Size{5, 7, 3}, Size{3, 1, 2}, Size{37, 3, 2},
                                         Size{2, 19, 29}));

TEST_P(AttnResSizes, ColumnBlocksAgreeWithDifferences) {
  const auto [N, D, S] = GetParam();
  CpuStream s;
  Buffer g({D}), q({1, D}), dy0({N, D}), dg({D}), dq({1, D});
  g.normal(1, 0.3f, 1.f), q.normal(2, 0.7f), dy0.normal(3), dg.zero(), dq.zero();
  std::vector<std::unique_ptr<Block>> memory;
  std::vector<Tensor> sources, dsources;
  std::vector<Doubles> v;
  for (int64_t j = 0; j < S; ++j) {
    Buffer x({N, D}), zero({N, D});
    v.push_back(doubles(x.normal(static_cast<uint64_t>(10 + j), 1.f + 0.2f * static_cast<float>(j))));
    memory.push_back(std::make_unique<Block>(N, D));
    sources.push_back(memory.back()->copy(x));
    memory.push_back(std::make_unique<Block>(N, D));
    dsources.push_back(memory.back()->copy(zero.zero()));
  }
  Block y(N, D), dy(N, D), alpha(N, S), rstd(N, S);
  dy.copy(dy0);
  attn_res_forward(s, y, alpha, rstd, sources, g, q, 1e-2f);
  attn_res_backward(s, dsources, dg, dq, dy, sources, alpha, rstd, g, q);

  Doubles vg = doubles(g), vq = doubles(q);
  const Doubles vdy = doubles(dy0);
  auto loss = [&] { return inner(naive_mix(v, vg, vq, 1e-2), vdy); };
  // Softmax of logits up to sqrt(D) |u|, about 6: their fp32 error of 1e-6 is the error of alpha.
  EXPECT_LE(relative_error(y, naive_mix(v, vg, vq, 1e-2)), 3e-6);
  // b_j - sum a b cancels by about the number of sources.
  Doubles got, want;
  for (int64_t j = 0; j < S; ++j) {
    const Doubles one = differences(v[static_cast<size_t>(j)], loss), mine = doubles(dsources[static_cast<size_t>(j)]);
    want.insert(want.end(), one.begin(), one.end()), got.insert(got.end(), mine.begin(), mine.end());
  }
  EXPECT_LE(relative_error(got, want), 1e-5);
  EXPECT_LE(relative_error(dg, differences(vg, loss)), 2e-5);
  EXPECT_LE(relative_error(dq, differences(vq, loss)), 2e-5);
  EXPECT_TRUE(y.untouched() && alpha.untouched() && rstd.untouched());
  for (const auto& m : memory) EXPECT_TRUE(m->untouched());
}

// A mix of S rows of N(0, 1) over contiguous memory, for the tests of special values.
struct Plain {
  int64_t N, D, S;
  CpuStream s;
  Buffer v, dv, g, q, dy, y, alpha, rstd, dg, dq;
  std::vector<Tensor> sources, dsources;
  Plain(int64_t n, int64_t d, int64_t count)
      : N(n),
        D(d),
        S(count),
        v({S, N, D}),
        dv({S, N, D}),
        g({D}),
        q({1, D}),
        dy({N, D}),
        y({N, D}),
        alpha({N, S}),
        rstd({N, S}),
        dg({D}),
        dq({1, D}) {
    v.normal(1), g.normal(2, 0.1f, 1.f), q.normal(3, 0.3f), dy.normal(4);
    for (int64_t j = 0; j < S; ++j) {
      sources.push_back((*v)[j]);
      dsources.push_back((*dv)[j]);
    }
  }
  void run() {
    dv.zero(), dg.zero(), dq.zero();
    attn_res_forward(s, y, alpha, rstd, sources, g, q, 1e-5f);
    attn_res_backward(s, dsources, dg, dq, dy, sources, alpha, rstd, g, q);
  }
};

TEST(AttnRes, ZeroQueryMixesEvenlyAndMovesTheQueryOnly) {
  for (int64_t S : {1, 2, 3, 7, 9}) {
    Plain m(5, 24, S);
    m.q.zero();
    m.run();
    double moved = 0;
    for (int64_t i = 0; i < m.N * S; ++i) EXPECT_EQ(m.alpha[i], 1.f / static_cast<float>(S));
    for (int64_t c = 0; c < m.D; ++c) {
      EXPECT_EQ(std::bit_cast<uint32_t>(m.dg[c]), 0u);
      moved = std::max(moved, std::fabs(static_cast<double>(m.dq[c])));
    }
    EXPECT_EQ(moved > 0, S > 1);
  }
}

TEST(AttnRes, ExtremeLogitsChooseOneSourceAndStayFinite) {
  for (const float size : {1e3f, -1e3f, 1e6f}) {
    Plain m(7, 24, 4);
    for (int64_t c = 0; c < m.D; ++c) m.q[c] *= size;
    m.run();
    EXPECT_TRUE(all_finite(m.y) && all_finite(m.dv) && all_finite(m.dg) && all_finite(m.dq));
    for (int64_t n = 0; n < m.N; ++n) {
      int ones = 0, zeros = 0;
      for (int64_t j = 0; j < m.S; ++j) {
        ones += m.alpha[n * m.S + j] == 1.f;
        zeros += m.alpha[n * m.S + j] < 1e-10f;  // logits hundreds apart
      }
      EXPECT_EQ(ones, 1) << n;
      EXPECT_EQ(zeros, m.S - 1) << n;
    }
  }
}

TEST(AttnRes, RowsOfZerosHaveLogitZeroAndFiniteGradients) {
  Plain m(3, 24, 3);
  std::memset(m.sources[1].data, 0, static_cast<size_t>(m.sources[1].bytes()));
  m.run();
  EXPECT_TRUE(all_finite(m.y) && all_finite(m.dv) && all_finite(m.dg) && all_finite(m.dq));
  for (int64_t n = 0; n < m.N; ++n) EXPECT_FLOAT_EQ(m.rstd[n * m.S + 1], 1.f / std::sqrt(1e-5f));
  m.v.zero();
  m.run();
  for (int64_t i = 0; i < m.N * m.S; ++i) EXPECT_EQ(m.alpha[i], 1.f / 3.f);
  EXPECT_TRUE(all_finite(m.dv) && all_finite(m.dq));
}

TEST(AttnRes, ABrokenTokenDoesNotReachOtherTokens) {
  Plain clean(5, 24, 3), broken(5, 24, 3);
  broken.sources[1].f32()[2 * 24 + 7] = std::nanf("");  // token 2
  clean.run();
  broken.run();
  EXPECT_TRUE(std::isnan(broken.y[2 * 24]));
  for (int64_t n : {0, 1, 3, 4}) {
    EXPECT_TRUE(same_bits(clean.y->slice(n, 1), broken.y->slice(n, 1)));
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_TRUE(same_bits(clean.dsources[j].slice(n, 1), broken.dsources[j].slice(n, 1)));
    }
  }
}

TEST(AttnRes, BitsDoNotDependOnTheThreadCount) {
  Plain one(101, 37, 4), two(101, 37, 4);
  with_threads(1, [&] { one.run(); });
  with_threads(2, [&] { two.run(); });
  EXPECT_TRUE(same_bits(one.y, two.y) && same_bits(one.alpha, two.alpha) && same_bits(one.dv, two.dv));
  EXPECT_TRUE(same_bits(one.dg, two.dg) && same_bits(one.dq, two.dq));
}

TEST(AttnRes, NoTokensAndWrongShapes) {
  Plain none(0, 8, 2);
  none.run();
  for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(none.dq[c], 0.f);
  Plain m(3, 8, 2);
  Buffer square({2, 2});
  EXPECT_THROW(attn_res_forward(m.s, m.y, m.alpha, m.rstd, {}, m.g, m.q, 1e-5f), ContractError);
  EXPECT_THROW(attn_res_forward(m.s, m.y, square, m.rstd, m.sources, m.g, m.q, 1e-5f), ContractError);
  EXPECT_THROW(attn_res_backward(m.s, {m.dsources[0]}, m.dg, m.dq, m.dy, m.sources, m.alpha, m.rstd, m.g, m.q),
               ContractError);
}

}  // namespace
}  // namespace kestrel::test
