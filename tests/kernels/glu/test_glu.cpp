#include "kernels/glu/glu.h"

#include "tests/kernels/norm/naive.h"

namespace kestrel::test {
namespace {

// Elementwise forms of about ten fp32 roundings and exponentials good to 3e-7.
constexpr double kNaive = 2e-6;

double naive_value(const Glu& g, double a, double b) {
  const double s = 1 / (1 + std::exp(-a));
  if (g.kind == Glu::Kind::silu) return a * s * b;
  const double beta = g.beta, linear = g.linear_beta;
  return beta * std::tanh(a / beta) * s * linear * std::tanh(b / linear);
}

Doubles naive_glu(const Glu& g, const Doubles& a, const Doubles& b, const Doubles& p) {
  Doubles y(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    y[i] = naive_value(g, a[i], b[i]) * (p.empty() ? 1 : p[i / (a.size() / p.size())]);
  }
  return y;
}

TEST(SituGlu, MatchesFixture) {
  const SafetensorsFile f = fixture("situ_glu");
  const Tensor a = f.tensor("a"), b = f.tensor("b");
  CpuStream s;
  Buffer y({a.rows(), a.cols()}), da({a.rows(), a.cols()}), db({a.rows(), a.cols()});
  glu_forward(s, Glu{}, y, a, b);
  EXPECT_LE(relative_error(y, f.tensor("out")), 1e-5);  // golden bound of the house
  glu_backward(s, Glu{}, da, db, {}, f.tensor("d_out"), a, b);
  EXPECT_LE(relative_error(da, f.tensor("d_a")), 1e-4);  // golden bound of the house
  EXPECT_LE(relative_error(db, f.tensor("d_b")), 1e-4);
}

struct Case {
  Glu::Kind kind;
  int64_t N, F;
  bool scaled;
};
class GluCases : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Awkward, GluCases,
                         testing::Values(Case{Glu::Kind::situ, 1, 1, false}, Case{Glu::Kind::situ, 5, 13, true},
                                         Case{Glu::Kind::situ, 3, 72, false}, Case{Glu::Kind::silu, 1, 1, true},
                                         Case{Glu::Kind::silu, 7, 31, false}, Case{Glu::Kind::silu, 4, 9, true}));

// a and b are the halves of one product, as the model uses them.
TEST_P(GluCases, HalvesOfAProductAgreeWithDifferences) {
  const auto [kind, N, F, scaled] = GetParam();
  const Glu glu{kind, 3.f, 7.f};
  CpuStream s;
  Buffer ab({N, 2 * F}), dab({N, 2 * F}), y({N, F}), dy({N, F}), p({N}), dp({N});
  ab.normal(1, 4.f), dy.normal(2), p.normal(3, 0.5f, 1.f);
  const Tensor a = ab->columns(0, F), b = ab->columns(F, F);
  const Tensor scale = scaled ? *p : Tensor{};
  glu_forward(s, glu, y, a, b, scale);
  glu_backward(s, glu, dab->columns(0, F), dab->columns(F, F), scaled ? *dp : Tensor{}, dy, a, b, scale);

  Doubles va = doubles(a), vb = doubles(b), vp = scaled ? doubles(p) : Doubles{};
  const Doubles vdy = doubles(dy);
  auto loss = [&] { return inner(naive_glu(glu, va, vb, vp), vdy); };
  EXPECT_LE(relative_error(y, naive_glu(glu, va, vb, vp)), kNaive);
  EXPECT_LE(relative_error(dab->columns(0, F), differences(va, loss)), kNaive);
  EXPECT_LE(relative_error(dab->columns(F, F), differences(vb, loss)), kNaive);
  if (scaled) {
    EXPECT_LE(relative_error(dp, differences(vp, loss)), kNaive);
  }
}

TEST(SituGlu, SlopesInTheTailsKeepTheirRelativeAccuracy) {
  // tanh(a/4) rounds to 1 beyond a = 36, yet the slopes there are not zero.
  const int64_t F = 6;
  CpuStream s;
  Buffer a({1, F}), b({1, F}), dy({1, F}), da({1, F}), db({1, F});
  const float as[] = {40.f, -40.f, 60.f, 1e-4f, -3e-3f, 1.f}, bs[] = {300.f, -300.f, 1e-5f, 400.f, 2.f, -500.f};
  for (int64_t i = 0; i < F; ++i) a[i] = as[i], b[i] = bs[i], dy[i] = 1.f;
  glu_backward(s, Glu{}, da, db, {}, dy, a, b);
  for (int64_t i = 0; i < F; ++i) {
    const double x = a[i], z = b[i], sg = 1 / (1 + std::exp(-x)), sg_minus = 1 / (1 + std::exp(x));
    auto sech2 = [](double v) { return 1 / (std::cosh(v) * std::cosh(v)); };
    const double want_a = (sech2(x / 4) * sg + 4 * std::tanh(x / 4) * sg * sg_minus) * 25 * std::tanh(z / 25);
    const double want_b = 4 * std::tanh(x / 4) * sg * sech2(z / 25);
    // The exponent's own rounding, 6e-8 |argument| with arguments up to 60, dominates.
    EXPECT_NEAR(da[i], want_a, 5e-6 * std::fabs(want_a)) << i;
    EXPECT_NEAR(db[i], want_b, 5e-6 * std::fabs(want_b)) << i;
  }
}

TEST(Glu, HugeInputsStayFinite) {
  const int64_t F = 4;
  for (Glu::Kind kind : {Glu::Kind::situ, Glu::Kind::silu}) {
    CpuStream s;
    Buffer a({1, F}), b({1, F}), dy({1, F}), y({1, F}), da({1, F}), db({1, F}), dp({1});
    const float as[] = {1e4f, -1e4f, 0.f, -0.f};
    for (int64_t i = 0; i < F; ++i) a[i] = as[i], b[i] = -as[i] + 1.f, dy[i] = 1.f;
    glu_forward(s, Glu{kind}, y, a, b);
    glu_backward(s, Glu{kind}, da, db, dp, dy, a, b);
    EXPECT_TRUE(all_finite(y) && all_finite(da) && all_finite(db) && all_finite(dp));
    EXPECT_EQ(y[1], 0.f);
    if (kind == Glu::Kind::situ) {
      EXPECT_FLOAT_EQ(y[0], -100.f);  // |y| <= beta linear_beta
    }
  }
}

TEST(Glu, InPlaceGivesTheSameBits) {
  const int64_t N = 3, F = 21;
  for (Glu::Kind kind : {Glu::Kind::situ, Glu::Kind::silu}) {
    const Glu glu{kind};
    CpuStream s;
    Buffer a({N, F}), b({N, F}), dy({N, F}), y({N, F}), da({N, F}), db({N, F}), a2({N, F});
    a.normal(1, 3.f), b.normal(2, 3.f), dy.normal(3), a2.copy(a);
    glu_forward(s, glu, y, a, b);
    glu_forward(s, glu, a2, a2, b);
    EXPECT_TRUE(same_bits(a2, y));
    glu_backward(s, glu, da, db, {}, dy, a, b);
    glu_backward(s, glu, a, b, {}, dy, a, b);
    EXPECT_TRUE(same_bits(a, da) && same_bits(b, db));
  }
}

TEST(SigmoidGate, ColumnBlocksAgreeWithDifferences) {
  const int64_t N = 5, D = 13;
  CpuStream s;
  Buffer o0({N, D}), g0({N, D}), dy0({N, D});
  o0.normal(1), g0.normal(2, 3.f), dy0.normal(3);
  Block o(N, D), gate(N, D), dy(N, D), y(N, D), d_o(N, D), dgate(N, D);
  o.copy(o0), gate.copy(g0), dy.copy(dy0);
  sigmoid_gate_forward(s, y, o, gate);
  sigmoid_gate_backward(s, d_o, dgate, dy, o, gate);
  Doubles vo = doubles(o0), vg = doubles(g0);
  const Doubles vdy = doubles(dy0);
  auto forward = [&] {
    Doubles v = vo;
    for (size_t i = 0; i < v.size(); ++i) v[i] /= 1 + std::exp(-vg[i]);
    return v;
  };
  auto loss = [&] { return inner(forward(), vdy); };
  EXPECT_LE(relative_error(y, forward()), kNaive);
  EXPECT_LE(relative_error(d_o, differences(vo, loss)), kNaive);
  EXPECT_LE(relative_error(dgate, differences(vg, loss)), kNaive);
  EXPECT_TRUE(y.untouched() && d_o.untouched() && dgate.untouched());

  Buffer dy1({N, D}), g1({N, D});
  dy1.copy(dy0), g1.copy(g0);
  sigmoid_gate_backward(s, dy1, g1, dy1, o, g1);  // in place
  EXPECT_TRUE(same_bits(dy1, d_o) && same_bits(g1, dgate));
}

TEST(Glu, BitsDoNotDependOnTheThreadCount) {
  const int64_t N = 101, F = 37;
  Buffer a({N, F}), b({N, F}), dy({N, F}), p({N});
  a.normal(1, 3.f), b.normal(2, 3.f), dy.normal(3), p.normal(4);
  auto run = [&](int threads, Buffer& out, Buffer& dp) {
    with_threads(threads, [&] {
      CpuStream s;
      auto part = [&](int64_t i) { return Tensor(out.f() + i * N * F, {N, F}); };
      glu_forward(s, Glu{}, part(0), a, b, p);
      glu_backward(s, Glu{}, part(1), part(2), dp, dy, a, b, p);
      sigmoid_gate_forward(s, part(3), a, b);
      sigmoid_gate_backward(s, part(4), part(5), dy, a, b);
      glu_forward(s, Glu{Glu::Kind::silu}, part(6), a, b, p);
      glu_backward(s, Glu{Glu::Kind::silu}, part(7), part(8), {}, dy, a, b, p);
    });
  };
  Buffer one({9, N, F}), two({9, N, F}), dp_one({N}), dp_two({N});
  run(1, one, dp_one);
  run(2, two, dp_two);
  EXPECT_TRUE(same_bits(one, two) && same_bits(dp_one, dp_two));
}

TEST(Glu, EmptyAndWrongShapes) {
  CpuStream s;
  Buffer none({0, 5}), x({2, 5}), y({2, 4}), p({3});
  x.normal(1);
  glu_forward(s, Glu{}, none, none, none);
  sigmoid_gate_forward(s, none, none, none);
  EXPECT_THROW(glu_forward(s, Glu{}, y, x, x), ContractError);
  EXPECT_THROW(glu_forward(s, Glu{}, x, x, x, p), ContractError);
  EXPECT_THROW((glu_forward(s, Glu{Glu::Kind::situ, 0.f, 25.f}, x, x, x)), ContractError);
  EXPECT_THROW(sigmoid_gate_forward(s, y, x, x), ContractError);
}

}  // namespace
}  // namespace kestrel::test
