#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

double squares(Stream& s, const std::vector<Tensor>& tensors) {
  Buffer out({1}, DType::f64);
  *(*out).as<double>() = 0;
  sum_of_squares(s, out, tensors);
  return *(*out).as<double>();
}

}  // namespace

TEST(SumOfSquares, ClipsTheGlobalNorm) {
  CpuStream s;
  Buffer a({1}), b({1});
  a[0] = 3.f;
  b[0] = 4.f;
  const double norm = std::sqrt(squares(s, {a, b}));
  EXPECT_EQ(norm, 5.0);
  const double scale = std::min(1.0, 1.0 / (norm + 1e-6));
  EXPECT_NEAR(3 * scale, .6, 1e-6);  // the 1e-6 beside the norm
  EXPECT_NEAR(4 * scale, .8, 1e-6);
  EXPECT_EQ(squares(s, {}), 0.0);
}

TEST(SumOfSquares, AccumulatesInFloat64) {
  CpuStream s;
  Buffer x({3, 100003});
  x.normal(1, 1e-3f);
  x[7] = 1e4f;  // in fp32 the rest would vanish beside it
  double expected = 0;
  for (int64_t i = 0; i < x->numel(); ++i) expected += static_cast<double>(x[i]) * x[i];
  EXPECT_NEAR(squares(s, {x}) / expected, 1.0, 1e-11);  // 300009 fp64 additions of either sum, 1e-16 each
  Buffer out({1}, DType::f64);
  *(*out).as<double>() = 5.0;
  sum_of_squares(s, out, {(*x).columns(7, 1)});  // adds to what is there; any ld
  const double column = double(x[7]) * x[7] + double(x[100010]) * x[100010] + double(x[200013]) * x[200013];
  EXPECT_NEAR(*(*out).as<double>(), 5.0 + column, 1e-6);  // fp64 of 1e8
}

TEST(SumOfSquares, ShowsEveryNonFiniteElement) {
  CpuStream s;
  Buffer x({70001}), y({3});
  y.normal(1);
  for (const int64_t at : {0, 16384, 70000}) {
    for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      x.normal(2);
      x[at] = bad;
      EXPECT_FALSE(std::isfinite(squares(s, {y, x})));
      EXPECT_FALSE(std::isfinite(squares(s, {x, y})));
    }
  }
  x.normal(2);
  x[5] = 3e38f;  // large but finite: its square fits fp64
  EXPECT_TRUE(std::isfinite(squares(s, {x})));
}

TEST(SumOfSquares, BitsDoNotDependOnThreads) {
  CpuStream s;
  Buffer x({300007});
  x.normal(1);
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const double one = squares(s, {x, x});
  omp_set_num_threads(2);
  const double two = squares(s, {x, x});
  omp_set_num_threads(before);
  EXPECT_EQ(one, two);
}

TEST(QkClip, Fixture) {
  const auto f = fixture("qk_clip");
  CpuStream s;
  Buffer q({36, 22}), kv({44, 14});
  q.copy(f.tensor("q_b"));
  kv.copy(f.tensor("kv_b"));
  qk_clip(s, q, kv, f.tensor("s_max"), 100.f, 12, 6, 10);
  EXPECT_LE(relative_error(q, f.tensor("q_b_out")), 1e-6);  // one fp32 product an element
  EXPECT_LE(relative_error(kv, f.tensor("kv_b_out")), 1e-6);
}

TEST(QkClip, ScalesTheLargestLogitToTau) {
  CpuStream s;
  constexpr int64_t nope = 3, rope = 2, v = 4, in = 5, c = 6;
  Buffer q({2 * (nope + rope), in}), kv({2 * (nope + v), c}), most({2});
  q.normal(1);
  kv.normal(2);
  most[0] = 250.f;
  most[1] = 50.f;
  const std::vector<float> q0(q.f(), q.f() + q->numel()), kv0(kv.f(), kv.f() + kv->numel());
  qk_clip(s, q, kv, most, 100.f, nope, rope, v);
  for (int64_t r = 0; r < q->rows(); ++r) {
    const double factor = r < nope ? .63245553 : r < nope + rope ? .4 : 1.0;
    for (int64_t j = 0; j < in; ++j) {
      const double before = q0[static_cast<size_t>(r * in + j)];
      EXPECT_NEAR(q[r * in + j], factor * before, 2e-7 * std::fabs(before));  // fp32
    }
  }
  for (int64_t r = 0; r < kv->rows(); ++r) {
    for (int64_t j = 0; j < c; ++j) {
      const double before = kv0[static_cast<size_t>(r * c + j)];
      EXPECT_NEAR(kv[r * c + j], (r < nope ? .63245553 : 1.0) * before, 2e-7 * std::fabs(before));  // fp32
    }
  }
  // A logit of 250 is nope.nope + rope.shared: both parts shrink by 0.4, so it becomes 100.
  EXPECT_NEAR(250 * double(q[0]) * kv[0] / (double(q0[0]) * kv0[0]), 100.0, 1e-4);  // fp32
  EXPECT_NEAR(250 * double(q[nope * in]) / q0[nope * in], 100.0, 1e-4);             // fp32
}

TEST(QkClip, LeavesHeadsWithoutANumberAlone) {
  CpuStream s;
  Buffer q({5 * 3, 4}), kv({5 * 3, 4}), most({5});
  q.normal(1);
  kv.normal(2);
  const float values[] = {0.f, -5.f, std::nanf(""), HUGE_VALF, 100.f};
  for (int i = 0; i < 5; ++i) most[i] = values[i];
  const std::vector<float> q0(q.f(), q.f() + 60), kv0(kv.f(), kv.f() + 60);
  qk_clip(s, q, kv, most, 100.f, 2, 1, 1);
  EXPECT_EQ(std::memcmp(q.f(), q0.data(), 60 * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(kv.f(), kv0.data(), 60 * sizeof(float)), 0);
  EXPECT_THROW(qk_clip(s, q, kv, most, 100.f, 2, 2, 1), ContractError);
}
