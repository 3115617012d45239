#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

TEST(AdamW, Fixture) {
  const auto f = fixture("optimizer_steps");
  CpuStream s;
  Buffer p({12, 20}), m({12, 20}), v({12, 20});
  p.copy(f.tensor("p"));
  m.zero();
  v.zero();
  AdamW h{.lr = 1e-2f};
  for (int64_t i = 0; i < 4; ++i) {
    h.t = i + 1;
    adamw_step(s, h, p, f.tensor("g")[i], m, v, 1.f);
  }
  // Four steps of a handful of fp32 roundings each.
  EXPECT_LE(relative_error(p, f.tensor("adamw")), 1e-6);
  EXPECT_LE(relative_error(m, f.tensor("adamw_m")), 1e-6);
  EXPECT_LE(relative_error(v, f.tensor("adamw_v")), 1e-6);
}

TEST(AdamW, ThreeStepsOfOneNumber) {
  CpuStream s;
  Buffer p({1}), g({1}), m({1}), v({1});
  p[0] = 1.f;
  m.zero();
  v.zero();
  AdamW h{.lr = 0.1f};
  const float grads[] = {1.f, 2.f, -3.f};
  const double weights[] = {.8900000010, .7853014146, .7840145117};
  const double firsts[] = {.1, .29, -.039}, seconds[] = {.05, .2475, .685125};
  for (int i = 0; i < 3; ++i) {
    h.t = i + 1;
    g[0] = grads[i];
    adamw_step(s, h, p, g, m, v, 1.f);
    EXPECT_NEAR(p[0], weights[i], 3e-7);  // a few roundings of numbers below one
    EXPECT_NEAR(m[0], firsts[i], 1e-7);
    EXPECT_NEAR(v[0], seconds[i], 1e-6);  // 1 - 0.95f is 0.05 to 1e-6 of itself
  }
}

TEST(AdamW, GradientScaleClipsWithoutTouchingTheGradient) {
  CpuStream s;
  Buffer p({3, 7}), q({3, 7}), g({3, 7}), scaled({3, 7}), m({3, 7}), v({3, 7}), m2({3, 7}), v2({3, 7});
  p.normal(1);
  q.copy(p);
  g.normal(2);
  m.zero();
  v.zero();
  m2.zero();
  v2.zero();
  const std::vector<float> before(g.f(), g.f() + 21);
  for (int i = 0; i < 21; ++i) scaled[i] = 0.25f * g[i];  // a power of two: exact
  adamw_step(s, {.lr = 0.01f}, p, g, m, v, 0.25f);
  adamw_step(s, {.lr = 0.01f}, q, scaled, m2, v2, 1.f);
  for (int i = 0; i < 21; ++i) {
    EXPECT_EQ(p[i], q[i]);
    EXPECT_EQ(m[i], m2[i]);
    EXPECT_EQ(v[i], v2[i]);
    EXPECT_EQ(g[i], before[static_cast<size_t>(i)]);
  }
}

TEST(AdamW, TinyGradientsFeelOnlyEps) {
  CpuStream s;
  Buffer p({2}), g({2}), m({2}), v({2});
  p.zero();
  m.zero();
  v.zero();
  g[0] = 3e-8f;
  g[1] = -1.f;
  adamw_step(s, {.lr = 1.f, .weight_decay = 0.f}, p, g, m, v, 1.f);
  EXPECT_NEAR(p[0], -3.0 / (3.0 + 1.0), 1e-6);  // g / (|g| + eps) with eps = 1e-8, fp32
  EXPECT_NEAR(p[1], 1.0, 1e-6);                 // fp32
}

TEST(AdamW, RateZeroLeavesBitsAndDecayNeedsNoGradient) {
  CpuStream s;
  Buffer p({5, 13}), g({5, 13}), m({5, 13}), v({5, 13});
  p.normal(1);
  g.normal(2);
  m.zero();
  v.zero();
  const std::vector<float> before(p.f(), p.f() + 65);
  adamw_step(s, {.lr = 0.f}, p, g, m, v, 1.f);
  EXPECT_EQ(std::memcmp(p.f(), before.data(), 65 * sizeof(float)), 0);
  g.zero();
  m.zero();
  v.zero();
  adamw_step(s, {.lr = 0.5f, .weight_decay = 0.f}, p, g, m, v, 1.f);
  EXPECT_EQ(std::memcmp(p.f(), before.data(), 65 * sizeof(float)), 0);  // A_log, dt_bias: no gradient, no decay
  adamw_step(s, {.lr = 0.5f, .weight_decay = 0.5f}, p, g, m, v, 1.f);
  for (int i = 0; i < 65; ++i) EXPECT_EQ(p[i], 0.75f * before[static_cast<size_t>(i)]);  // exact in binary
}

TEST(AdamW, BitsDoNotDependOnThreads) {
  CpuStream s;
  const int before = omp_get_max_threads();
  Buffer start({50021}), g({50021}), one({50021}), two({50021}), m({50021}), v({50021});
  start.normal(1);
  g.normal(2);
  for (const int threads : {1, 2}) {
    omp_set_num_threads(threads);
    Buffer& p = threads == 1 ? one : two;
    p.copy(start);
    m.zero();
    v.zero();
    adamw_step(s, {.lr = 0.01f}, p, g, m, v, 0.7f);
  }
  omp_set_num_threads(before);
  EXPECT_EQ(std::memcmp(one.f(), two.f(), 50021 * sizeof(float)), 0);
}

TEST(AdamW, RefusesAnotherShapeAndStepZero) {
  CpuStream s;
  Buffer p({4}), g({5});
  EXPECT_THROW(adamw_step(s, {.lr = 0.1f}, p, g, p, p, 1.f), ContractError);
  EXPECT_THROW(adamw_step(s, {.lr = 0.1f, .t = 0}, p, p, p, p, 1.f), ContractError);
  Buffer none({0, 4});
  adamw_step(s, {.lr = 0.1f}, none, none, none, none, 1.f);  // nothing to do is fine
}
