#include <omp.h>

#include <limits>

#include "kernels/core/elementwise.h"
#include "kernels/loss/loss.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::Buffer;
using test::CpuStream;
using test::relative_error;

constexpr int64_t kArena = int64_t{128} << 20;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

TEST(Loss, GoldenFixture) {
  const auto f = test::fixture("cross_entropy");
  const Tensor logits = f.tensor("logits"), targets = f.tensor("targets");
  const int64_t N = logits.rows(), V = logits.cols();
  int64_t valid = 0;
  for (int64_t n = 0; n < N; ++n) valid += targets.i32()[n] != kIgnoreTarget;
  const float scale = f.tensor("d_out").f32()[0] / static_cast<float>(valid);
  Buffer losses({N}), dlogits({N, V});
  CpuStream s(kArena);
  cross_entropy(s, losses, dlogits, logits, targets, scale);
  double loss = 0;
  for (int64_t n = 0; n < N; ++n) loss += losses[n];
  // golden limits of fp32: outputs 1e-5, gradients 1e-4
  EXPECT_NEAR(loss / static_cast<double>(valid), f.tensor("out").f32()[0], 1e-5);
  EXPECT_LE(relative_error(dlogits, f.tensor("d_logits")), 1e-4);
  // in place, and without a gradient
  Buffer in_place({N, V}), again({N});
  in_place.copy(logits);
  cross_entropy(s, again, in_place, in_place, targets, scale);
  EXPECT_TRUE(same_bits(in_place, dlogits) && same_bits(again, losses));
  cross_entropy(s, again.zero(), {}, logits, targets, scale);
  EXPECT_LE(relative_error(again, losses), 1e-7);  // the sums may be cut into vectors differently
}

struct Linear {
  int64_t N, D, V;
  Buffer x, w, targets, losses, dx, dw;
  Linear(int64_t n, int64_t d, int64_t v)
      : N(n), D(d), V(v), x({n, d}), w({v, d}), targets({n}, DType::i32), losses({n}), dx({n, d}), dw({v, d}) {
    x.normal(1);
    w.normal(2, 0.5f);
    dw.normal(3, 0.01f);
    std::mt19937_64 rng(4);
    for (int64_t i = 0; i < n; ++i) {
      targets->i32()[i] = i % 7 == 3 ? kIgnoreTarget : static_cast<int32_t>(rng() % static_cast<uint64_t>(v));
    }
  }
};

// fp64 from the definition; dw starts from what it held.
void naive(const Linear& c, float scale, Buffer& losses, Buffer& dx, Buffer& dw) {
  std::vector<double> gw(static_cast<size_t>(c.V * c.D));
  for (size_t i = 0; i < gw.size(); ++i) gw[i] = c.dw[static_cast<int64_t>(i)];
  for (int64_t n = 0; n < c.N; ++n) {
    std::vector<double> z(static_cast<size_t>(c.V)), gx(static_cast<size_t>(c.D));
    const int32_t target = c.targets->i32()[n];
    double m = -1e300, sum = 0;
    for (int64_t v = 0; v < c.V; ++v) {
      double dot = 0;
      for (int64_t i = 0; i < c.D; ++i) dot += double{c.x[n * c.D + i]} * double{c.w[v * c.D + i]};
      z[static_cast<size_t>(v)] = dot;
      m = std::max(m, dot);
    }
    for (double a : z) sum += std::exp(a - m);
    const bool counts = target != kIgnoreTarget;
    losses[n] = counts ? static_cast<float>(m + std::log(sum) - z[static_cast<size_t>(target)]) : 0.f;
    for (int64_t v = 0; v < c.V; ++v) {
      const double g = counts ? scale * (std::exp(z[static_cast<size_t>(v)] - m) / sum - (v == target)) : 0.0;
      for (int64_t i = 0; i < c.D; ++i) {
        gx[static_cast<size_t>(i)] += g * c.w[v * c.D + i];
        gw[static_cast<size_t>(v * c.D + i)] += g * c.x[n * c.D + i];
      }
    }
    for (int64_t i = 0; i < c.D; ++i) dx[n * c.D + i] = static_cast<float>(gx[static_cast<size_t>(i)]);
  }
  for (size_t i = 0; i < gw.size(); ++i) dw[static_cast<int64_t>(i)] = static_cast<float>(gw[i]);
}

TEST(Loss, LinearEqualsTheDefinition) {
  // the last shape needs several blocks of rows: 4 Mi logits at a time is 64 rows of 65536
  for (auto [N, D, V] : {std::array<int64_t, 3>{1, 1, 1}, {5, 3, 2}, {33, 17, 50}, {67, 24, 1021}, {70, 3, 65536}}) {
    Linear c(N, D, V);
    Buffer losses({N}), dx({N, D}), dw({V, D});
    naive(c, 0.25f, losses, dx, dw);
    CpuStream s(kArena);
    linear_cross_entropy(s, c.losses, c.dx, c.dw, c.x, c.w, c.targets, 0.25f);
    EXPECT_LE(relative_error(c.losses, losses), 2e-6) << V;  // fp32 logits of size ~10
    EXPECT_LE(relative_error(c.dx, dx), 1e-5) << V;
    EXPECT_LE(relative_error(c.dw, dw), 1e-5) << V;
    for (int64_t n = 0; n < N; ++n) {
      if (c.targets->i32()[n] != kIgnoreTarget) continue;
      EXPECT_EQ(c.losses[n], 0.f);
      for (int64_t i = 0; i < D; ++i) EXPECT_EQ(c.dx[n * D + i], 0.f);
    }
  }
}

TEST(Loss, ScratchStaysSmall) {
  Arena plan = Arena::planner(Device::cpu);
  Stream s(plan);
  const Tensor x = plan.keep({100000, 8}, DType::f32, "t"), w = plan.keep({163840, 8}, DType::f32, "t");
  const Tensor losses = plan.keep({100000}, DType::f32, "t"), targets = plan.keep({100000}, DType::i32, "t");
  const int64_t kept = plan.peak();
  linear_cross_entropy(s, losses, {}, {}, x, w, targets, 1.f);
  EXPECT_GT(plan.peak(), kept);
  EXPECT_LE(plan.peak() - kept, int64_t{17} << 20);  // about 16 MB
}

TEST(Loss, GradientsAreOptional) {
  Linear c(20, 8, 30);
  Buffer dx({20, 8}), dw({30, 8}), losses({20});
  dw.copy(c.dw);
  CpuStream s(kArena);
  linear_cross_entropy(s, c.losses, c.dx, c.dw, c.x, c.w, c.targets, 1.f);
  linear_cross_entropy(s, losses, dx, {}, c.x, c.w, c.targets, 1.f);
  EXPECT_TRUE(same_bits(dx, c.dx) && same_bits(losses, c.losses));
  linear_cross_entropy(s, losses, {}, dw, c.x, c.w, c.targets, 1.f);
  EXPECT_TRUE(same_bits(dw, c.dw));
  linear_cross_entropy(s, losses.zero(), {}, {}, c.x, c.w, c.targets, 1.f);
  EXPECT_LE(relative_error(losses, c.losses), 1e-7);  // the sums may be cut into vectors differently
}

TEST(Loss, ColumnBlocksOfX) {
  Linear c(20, 8, 30);
  Buffer wide({20, 12}), dwide({20, 15}), losses({20}), dw({30, 8});
  dw.copy(c.dw);
  CpuStream s(kArena);
  linear_cross_entropy(s, c.losses, c.dx, c.dw, c.x, c.w, c.targets, 1.f);
  copy_cast(s, wide->columns(2, 8), c.x);
  linear_cross_entropy(s, losses, dwide->columns(3, 8), dw, wide->columns(2, 8), c.w, c.targets, 1.f);
  EXPECT_LE(relative_error(dwide->columns(3, 8), c.dx), 1e-6);  // another path of the product may serve another ld
  EXPECT_LE(relative_error(dw, c.dw), 1e-6);
  EXPECT_TRUE(std::isnan(dwide[2]) && std::isnan(dwide[11])) << "written outside the block";
}

TEST(Loss, LargeLogitsAndUniformOnes) {
  Buffer logits({3, 4}), d({3, 4}), losses({3}), targets({3}, DType::i32);
  const float rows[3][4] = {{1000, 999, -1000, 0}, {-1000, -1000, -1000, -1000}, {0, 0, 0, 200}};
  std::memcpy(logits->data, rows, sizeof rows);
  for (int64_t n = 0; n < 3; ++n) targets->i32()[n] = 1;
  CpuStream s(kArena);
  cross_entropy(s, losses, d, logits, targets, 1.f);
  EXPECT_NEAR(losses[0], 1 + std::log1p(std::exp(-1.0)), 1e-6);  // fp32 result near 1
  EXPECT_NEAR(losses[1], std::log(4.0), 1e-6);
  EXPECT_NEAR(losses[2], 200, 1e-4);  // an ulp of 200 is 1.5e-5
  EXPECT_NEAR(d[4 + 1], -0.75, 1e-6);
}

// A NaN in one row shows in that row's loss and nowhere else.
TEST(Loss, NanStaysInItsRow) {
  Buffer logits({2, 40}), d({2, 40}), losses({2}), targets({2}, DType::i32);
  logits.normal(1);
  logits[7] = std::numeric_limits<float>::quiet_NaN();
  targets->i32()[0] = targets->i32()[1] = 3;
  CpuStream s(kArena);
  cross_entropy(s, losses, d, logits, targets, 1.f);
  EXPECT_TRUE(std::isnan(losses[0]));
  EXPECT_TRUE(std::isfinite(losses[1]));
}

TEST(Loss, RefusesTargetsOutsideTheVocabulary) {
  for (int32_t bad : {30, -1, -101, 1 << 30}) {
    Linear c(5, 2, 30);
    c.targets->i32()[4] = bad;
    CpuStream s(kArena);
    try {
      linear_cross_entropy(s, c.losses, c.dx, c.dw, c.x, c.w, c.targets, 1.f);
      ADD_FAILURE() << "target " << bad << " was taken";
    } catch (const DataError& e) {
      EXPECT_NE(std::string(e.what()).find(std::to_string(bad)), std::string::npos) << e.what();
    }
  }
}

TEST(Loss, SameBitsForEveryThreadCount) {
  const int threads = omp_get_max_threads();
  Linear one(90, 20, 333), two(90, 20, 333);
  CpuStream s(kArena);
  omp_set_num_threads(1);
  linear_cross_entropy(s, one.losses, one.dx, one.dw, one.x, one.w, one.targets, 0.1f);
  omp_set_num_threads(2);
  linear_cross_entropy(s, two.losses, two.dx, two.dw, two.x, two.w, two.targets, 0.1f);
  omp_set_num_threads(threads);
  EXPECT_TRUE(same_bits(one.losses, two.losses) && same_bits(one.dx, two.dx) && same_bits(one.dw, two.dw));
}

TEST(Loss, NoTokens) {
  Linear c(0, 4, 9);
  Buffer before({9, 4});
  before.copy(c.dw);
  CpuStream s(kArena);
  linear_cross_entropy(s, c.losses, c.dx, c.dw, c.x, c.w, c.targets, 1.f);
  EXPECT_TRUE(same_bits(c.dw, before));
}

}  // namespace
}  // namespace kestrel
