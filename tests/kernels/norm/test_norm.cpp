#include "kernels/norm/norm.h"

#include "tests/kernels/norm/naive.h"

namespace kestrel::test {
namespace {

// One fp32 rounding per operation and sums of at most a few hundred terms: the golden bounds of the house.
constexpr double kOut = 1e-5, kGrad = 1e-4;
// Against a naive fp64 form on the same fp32 inputs: a handful of roundings of 6e-8 each.
constexpr double kNaive = 2e-6;

// With one column dx is r u eps/(x^2 + eps), a difference of two terms about x^2/eps = 100 times as large.
double dx_bound(int64_t D) {
  return D == 1 ? 2e-5 : kNaive;
}

Doubles naive_rms(const Doubles& x, const Doubles& w, double eps) {
  const size_t D = w.size();
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += D) {
    double ss = 0;
    for (size_t c = 0; c < D; ++c) ss += x[row + c] * x[row + c];
    const double r = 1 / std::sqrt(ss / static_cast<double>(D) + eps);
    for (size_t c = 0; c < D; ++c) y[row + c] = w[c] * x[row + c] * r;
  }
  return y;
}

Doubles naive_l2(const Doubles& x, size_t D, double eps) {
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += D) {
    double ss = 0;
    for (size_t c = 0; c < D; ++c) ss += x[row + c] * x[row + c];
    for (size_t c = 0; c < D; ++c) y[row + c] = x[row + c] / std::sqrt(ss + eps);
  }
  return y;
}

Doubles times_sigmoid(Doubles y, const Doubles& gate) {
  for (size_t i = 0; i < y.size(); ++i) y[i] /= 1 + std::exp(-gate[i]);
  return y;
}

class RmsNormGolden : public testing::TestWithParam<const char*> {};

TEST_P(RmsNormGolden, MatchesFixture) {
  const SafetensorsFile f = fixture(GetParam());
  const Tensor x = f.tensor("x"), w = f.tensor("weight");
  const int64_t N = x.rows(), D = x.cols();
  CpuStream s;
  Buffer y({N, D}), rstd({N}), dx({N, D}), dw({D});
  rms_norm_forward(s, y, rstd, x, w, 1e-5f);
  EXPECT_LE(relative_error(y, f.tensor("out")), kOut);
  dw.zero();
  rms_norm_backward(s, dx, dw, f.tensor("d_out"), x, w, rstd);
  EXPECT_LE(relative_error(dx, f.tensor("d_x")), kGrad);
  EXPECT_LE(relative_error(dw, f.tensor("d_weight")), kGrad);
}
INSTANTIATE_TEST_SUITE_P(Fixtures, RmsNormGolden, testing::Values("rms_norm", "rms_norm_tiny"));

TEST(GatedRmsNorm, MatchesFixture) {
  const SafetensorsFile f = fixture("gated_rms_norm");
  const int64_t N = f.tensor("x").dim(0), H = f.tensor("x").dim(1), K = f.tensor("x").dim(2);
  const Tensor x = f.tensor("x").view({N, H * K}), gate = f.tensor("gate").view({N, H * K}), w = f.tensor("weight");
  CpuStream s;
  Buffer y({N, H * K}), rstd({N, H}), dx({N, H * K}), dgate({N, H * K}), dw({K});
  gated_rms_norm_forward(s, y, rstd, x, gate, w, 1e-5f);
  EXPECT_LE(relative_error(y, f.tensor("out")), kOut);
  dw.zero();
  gated_rms_norm_backward(s, dx, dgate, dw, f.tensor("d_out").view({N, H * K}), x, gate, w, rstd);
  EXPECT_LE(relative_error(dx, f.tensor("d_x")), kGrad);
  EXPECT_LE(relative_error(dgate, f.tensor("d_gate")), kGrad);
  EXPECT_LE(relative_error(dw, f.tensor("d_weight")), kGrad);
}

struct Size {
  int64_t N, D;
};
class NormSizes : public testing::TestWithParam<Size> {};
// 1, primes, one more than a piece of rows, vectors plus a tail.
INSTANTIATE_TEST_SUITE_P(Awkward, NormSizes,
                         testing::Values(Size{1, 1}, Size{1, 7}, Size{3, 1}, Size{5, 13}, Size{33, 17}, Size{2, 72}));

TEST_P(NormSizes, RmsNormOfColumnBlocksAgreesWithDifferences) {
  const auto [N, D] = GetParam();
  CpuStream s;
  Buffer x0({N, D}), w({D}), dy0({N, D}), rstd({N}), dw({D});
  x0.normal(1), w.normal(2, 0.3f, 1.f), dy0.normal(3), dw.normal(4);
  Block x(N, D), y(N, D), dy(N, D), dx(N, D);
  x.copy(x0), dy.copy(dy0);
  rms_norm_forward(s, y, rstd, x, w, 1e-2f);  // an eps that matters
  const Doubles dw_before = doubles(dw);
  rms_norm_backward(s, dx, dw, dy, x, w, rstd);

  Doubles vx = doubles(x0), vw = doubles(w);
  const Doubles vdy = doubles(dy0);
  auto loss = [&] { return inner(naive_rms(vx, vw, 1e-2), vdy); };
  EXPECT_LE(relative_error(y, naive_rms(vx, vw, 1e-2)), kNaive);
  EXPECT_LE(relative_error(dx, differences(vx, loss)), dx_bound(D));
  Doubles dw_want = differences(vw, loss);
  for (size_t i = 0; i < dw_want.size(); ++i) dw_want[i] += dw_before[i];
  EXPECT_LE(relative_error(dw, dw_want), kNaive);
  EXPECT_TRUE(y.untouched() && dx.untouched());
}

TEST_P(NormSizes, GatedNormOfThreeHeadsAgreesWithDifferences) {
  const auto [N, K] = GetParam();
  const int64_t H = 3, C = H * K;
  CpuStream s;
  Buffer x0({N, C}), g0({N, C}), w({K}), dy0({N, C}), rstd({N, H}), dw({K});
  x0.normal(1), g0.normal(5, 2.f), w.normal(2, 0.3f, 1.f), dy0.normal(3), dw.zero();
  Block x(N, C), gate(N, C), y(N, C), dy(N, C), dx(N, C), dgate(N, C);
  x.copy(x0), gate.copy(g0), dy.copy(dy0);
  gated_rms_norm_forward(s, y, rstd, x, gate, w, 1e-2f);
  gated_rms_norm_backward(s, dx, dgate, dw, dy, x, gate, w, rstd);

  Doubles vx = doubles(x0), vw = doubles(w), vg = doubles(g0);
  const Doubles vdy = doubles(dy0);
  auto forward = [&] { return times_sigmoid(naive_rms(vx, vw, 1e-2), vg); };
  auto loss = [&] { return inner(forward(), vdy); };
  EXPECT_LE(relative_error(y, forward()), kNaive);
  EXPECT_LE(relative_error(dx, differences(vx, loss)), dx_bound(K));
  EXPECT_LE(relative_error(dgate, differences(vg, loss)), kNaive);
  EXPECT_LE(relative_error(dw, differences(vw, loss)), kNaive);
  EXPECT_TRUE(y.untouched() && dx.untouched() && dgate.untouched());
}

TEST_P(NormSizes, L2NormAgreesWithDifferences) {
  const auto [N, D] = GetParam();
  CpuStream s;
  Buffer x0({N, D}), dy0({N, D});
  x0.normal(1), dy0.normal(3);
  Block x(N, D), y(N, D), dy(N, D), dx(N, D);
  x.copy(x0), dy.copy(dy0);
  l2_norm_forward(s, y, x, 1e-1f);
  l2_norm_backward(s, dx, dy, x, 1e-1f);
  Doubles vx = doubles(x0);
  const Doubles vdy = doubles(dy0);
  auto loss = [&] { return inner(naive_l2(vx, static_cast<size_t>(D), 1e-1), vdy); };
  EXPECT_LE(relative_error(y, naive_l2(vx, static_cast<size_t>(D), 1e-1)), kNaive);
  EXPECT_LE(relative_error(dx, differences(vx, loss)), dx_bound(D));
  EXPECT_TRUE(y.untouched() && dx.untouched());
}

TEST(RmsNorm, LongRowsKeepTheirAccuracy) {
  const int64_t N = 3, D = 7168;
  CpuStream s;
  Buffer x({N, D}), w({D}), y({N, D}), rstd({N});
  x.normal(7, 1.f, 3.f), w.normal(8);
  rms_norm_forward(s, y, rstd, x, w, 1e-5f);
  // Partial sums of a vector's lanes: 7168/8 additions each, error about sqrt(896) roundings at worst.
  EXPECT_LE(relative_error(y, naive_rms(doubles(x), doubles(w), 1e-5)), 2e-6);
}

TEST(RmsNorm, BetaOneAddsToTheGradient) {
  const int64_t N = 4, D = 19;
  CpuStream s;
  Buffer x({N, D}), w({D}), dy({N, D}), y({N, D}), rstd({N}), fresh({N, D}), sum({N, D}), dw({D});
  x.normal(1), w.normal(2), dy.normal(3), sum.normal(4), dw.zero();
  const Doubles before = doubles(sum);
  rms_norm_forward(s, y, rstd, x, w, 1e-5f);
  rms_norm_backward(s, fresh, dw, dy, x, w, rstd);
  rms_norm_backward(s, sum, dw, dy, x, w, rstd, 1.f);
  Doubles want = doubles(fresh);
  for (size_t i = 0; i < want.size(); ++i) want[i] += before[i];
  EXPECT_LE(relative_error(sum, want), 3e-7);  // one more addition, possibly fused
  EXPECT_THROW(rms_norm_backward(s, sum, dw, dy, x, w, rstd, 0.5f), ContractError);
}

TEST(RmsNorm, InPlaceGivesTheSameBits) {
  const int64_t N = 5, D = 37;
  CpuStream s;
  Buffer x({N, D}), w({D}), dy({N, D}), y({N, D}), rstd({N}), dx({N, D}), dw({D}), dw2({D});
  x.normal(1), w.normal(2), dy.normal(3), dw.zero(), dw2.zero();
  rms_norm_forward(s, y, rstd, x, w, 1e-5f);
  rms_norm_backward(s, dx, dw, dy, x, w, rstd);
  rms_norm_backward(s, dy, dw2, dy, x, w, rstd);
  EXPECT_TRUE(same_bits(dx, dy));
  EXPECT_TRUE(same_bits(dw, dw2));
  rms_norm_forward(s, x, rstd, x, w, 1e-5f);
  EXPECT_TRUE(same_bits(x, y));
}

TEST(GatedRmsNorm, InPlaceGivesTheSameBits) {
  const int64_t N = 5, H = 2, K = 19, C = H * K;
  CpuStream s;
  Buffer x({N, C}), gate({N, C}), w({K}), dy({N, C}), y({N, C}), rstd({N, H}), dx({N, C}), dgate({N, C}), dw({K});
  x.normal(1), gate.normal(2), w.normal(3), dy.normal(4), dw.zero();
  gated_rms_norm_forward(s, y, rstd, x, gate, w, 1e-5f);
  gated_rms_norm_backward(s, dx, dgate, dw, dy, x, gate, w, rstd);
  gated_rms_norm_backward(s, dy, gate, dw, dy, x, gate, w, rstd);
  EXPECT_TRUE(same_bits(dx, dy));
  EXPECT_TRUE(same_bits(dgate, gate));
}

TEST(GatedRmsNorm, ClosedAndOpenGatesStayFinite) {
  const int64_t N = 1, K = 4;
  CpuStream s;
  Buffer x({N, K}), gate({N, K}), w({K}), dy({N, K}), y({N, K}), rstd({N, 1}), dx({N, K}), dgate({N, K}), dw({K});
  x.normal(1), w.normal(2), dy.normal(3), dw.zero();
  gate[0] = -200.f, gate[1] = 200.f, gate[2] = -60.f, gate[3] = 60.f;
  gated_rms_norm_forward(s, y, rstd, x, gate, w, 1e-5f);
  gated_rms_norm_backward(s, dx, dgate, dw, dy, x, gate, w, rstd);
  EXPECT_TRUE(all_finite(y) && all_finite(dx) && all_finite(dgate) && all_finite(dw));
  EXPECT_EQ(y[0], 0.f);
  EXPECT_EQ(y[1], w[1] * (x[1] * rstd[0]));
  EXPECT_NE(dgate[3], 0.f);  // 1 - sigmoid(60) = 9e-27 is not lost
}

TEST(Norm, RowsOfZerosAreFinite) {
  const int64_t N = 2, D = 5;
  CpuStream s;
  Buffer x({N, D}), w({D}), dy({N, D}), y({N, D}), rstd({N}), dx({N, D}), dw({D});
  x.zero(), w.normal(2), dy.normal(3), dw.zero();
  rms_norm_forward(s, y, rstd, x, w, 1e-5f);
  rms_norm_backward(s, dx, dw, dy, x, w, rstd);
  for (int64_t i = 0; i < N * D; ++i) {
    EXPECT_EQ(y[i], 0.f);
    EXPECT_FLOAT_EQ(dx[i], rstd[i / D] * w[i % D] * dy[i]);
  }
  for (int64_t c = 0; c < D; ++c) EXPECT_EQ(dw[c], 0.f);
  l2_norm_forward(s, y, x, 1e-6f);
  l2_norm_backward(s, dx, dy, x, 1e-6f);
  EXPECT_EQ(y[0], 0.f);
  EXPECT_FLOAT_EQ(dx[0], 1e3f * dy[0]);
}

TEST(Norm, NoRowsIsNothingToDo) {
  CpuStream s;
  Buffer x({0, 5}), w({5}), rstd({0}), dw({5}), gate_rstd({0, 1});
  w.normal(1), dw.normal(2);
  const float before = dw[0];
  rms_norm_forward(s, x, rstd, x, w, 1e-5f);
  rms_norm_backward(s, x, dw, x, x, w, rstd);
  gated_rms_norm_forward(s, x, gate_rstd, x, x, w, 1e-5f);
  l2_norm_forward(s, x, x, 1e-6f);
  EXPECT_EQ(dw[0], before);
}

// Everything a norm writes, for 101 rows: three pieces and a part.
void run_all(Buffer& out) {
  const int64_t N = 101, H = 3, K = 24, D = H * K;
  CpuStream s;
  Buffer x({N, D}), gate({N, D}), w({D}), wk({K}), dy({N, D}), rstd({N}), rstd_k({N, H}), dw({D}), dwk({K});
  x.normal(1), gate.normal(2), w.normal(3), wk.normal(4), dy.normal(5), dw.zero(), dwk.zero();
  auto part = [&](int64_t i) { return Tensor(out.f() + i * N * D, {N, D}); };
  rms_norm_forward(s, part(0), rstd, x, w, 1e-5f);
  rms_norm_backward(s, part(1), dw, dy, x, w, rstd);
  gated_rms_norm_forward(s, part(2), rstd_k, x, gate, wk, 1e-5f);
  gated_rms_norm_backward(s, part(3), part(4), dwk, dy, x, gate, wk, rstd_k);
  l2_norm_forward(s, part(5), x, 1e-6f);
  l2_norm_backward(s, part(6), dy, x, 1e-6f);
  std::memcpy(part(7).f32(), dw.f(), static_cast<size_t>(dw->bytes()));
  std::memcpy(part(7).f32() + D, dwk.f(), static_cast<size_t>(dwk->bytes()));
}

TEST(Norm, BitsDoNotDependOnTheThreadCount) {
  Buffer one({8, 101, 72}), two({8, 101, 72});
  with_threads(1, [&] { run_all(one); });
  with_threads(2, [&] { run_all(two); });
  EXPECT_TRUE(same_bits(one, two));
}

TEST(Norm, PlanningTouchesNothingAndCountsTheScratch) {
  Arena planner = Arena::planner(Device::cpu);
  Stream s(planner);
  const Tensor x = s.temp({100, 40}), w = s.temp({40}), rstd = s.temp({100}), dw = s.temp({40});
  const int64_t before = planner.peak();
  rms_norm_forward(s, x, rstd, x, w, 1e-5f);
  EXPECT_EQ(planner.peak(), before);
  rms_norm_backward(s, x, dw, x, x, w, rstd);
  EXPECT_GE(planner.peak(), before + 4 * 40 * 4);  // four pieces of 32 rows, F32
}

TEST(Norm, WrongShapesAreRefused) {
  CpuStream s;
  Buffer x({3, 8}), y({3, 8}), w({8}), rstd({3}), bad_rstd({2}), w3({3}), ids({3, 8}, DType::i32);
  x.normal(1), w.normal(2);
  EXPECT_THROW(rms_norm_forward(s, y, bad_rstd, x, w, 1e-5f), ContractError);
  EXPECT_THROW(rms_norm_forward(s, y, rstd, x, w3, 1e-5f), ContractError);
  EXPECT_THROW(rms_norm_forward(s, ids, rstd, x, w, 1e-5f), ContractError);
  EXPECT_THROW(gated_rms_norm_forward(s, y, rstd, x, x, w3, 1e-5f), ContractError);  // 8 columns, heads of 3
}

}  // namespace
}  // namespace kestrel::test
