#include "kernels/core/elementwise.h"
#include "kernels/core/math.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.00390625f).bits, 0x3f80);  // halfway, even below
  EXPECT_EQ(bf16(1.01171875f).bits, 0x3f82);  // halfway, even above
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::nanf("")))));
  EXPECT_TRUE(std::isinf(static_cast<float>(bf16(3.4e38f))));  // above the largest bf16: rounds to infinity
}

TEST(Math, MatchesLibm) {
  for (double x = -100; x < 100; x += 0.00917) {
    const float f = static_cast<float>(x);
    if (x > -87 && x < 88) {
      EXPECT_NEAR(exp_f(f) / std::exp(static_cast<double>(f)), 1.0, 3e-7) << x;
    }
    EXPECT_NEAR(tanh_f(f), std::tanh(static_cast<double>(f)), 2e-7 * std::fabs(std::tanh(x)) + 1e-30) << x;
    EXPECT_NEAR(sigmoid_f(f), 1 / (1 + std::exp(-static_cast<double>(f))), 4e-7 / (1 + std::exp(-x)) + 1e-38) << x;
  }
  EXPECT_EQ(exp_f(-1000.f), 0.f);
  EXPECT_TRUE(std::isinf(exp_f(1000.f)));
  EXPECT_TRUE(std::isnan(exp_f(std::nanf(""))));
  EXPECT_EQ(sigmoid_f(-1000.f), 0.f);
  EXPECT_EQ(sigmoid_f(1000.f), 1.f);
}

TEST(Arena, TwoStacksAndAPlan) {
  const auto use = [](Arena& a) {
    const int64_t k = a.keep_mark();
    a.keep({10, 10}, DType::f32, "activations");
    {
      Stream s(a);
      ScratchScope scope(s);
      s.temp({1000});
    }
    a.keep({100}, DType::f32, "gradients");
    a.release_keep(k);
  };
  Arena plan = Arena::planner(Device::cpu);
  use(plan);
  EXPECT_EQ(plan.peak(), 512 + 4096);
  EXPECT_EQ(plan.by_purpose().at("scratch"), 4096);
  Arena real(Device::cpu, plan.peak());
  use(real);
  EXPECT_EQ(real.peak(), plan.peak());
  EXPECT_THROW(real.keep({2000}, DType::f32, "too much"), ContractError);
}

TEST(Tensor, ColumnsAndSlices) {
  Buffer b({4, 6});
  for (int i = 0; i < 24; ++i) b[i] = static_cast<float>(i);
  const Tensor c = (*b).columns(2, 3);
  EXPECT_EQ(c.rows(), 4);
  EXPECT_EQ(c.ld, 6);
  EXPECT_EQ(c.f32()[c.ld], 8.f);
  EXPECT_EQ((*b)[2].f32()[0], 12.f);
  EXPECT_THROW((*b).columns(4, 3), ContractError);
  EXPECT_THROW(c.view({12}), ContractError);
}

TEST(Elementwise, DocumentStarts) {
  CpuStream s;
  Buffer seg({2, 5}, DType::i32), start({2, 5}, DType::i32);
  const int32_t ids[] = {7, 7, 8, 8, 8, 1, 2, 2, 3, 3};
  std::memcpy(seg->data, ids, sizeof ids);
  document_starts(s, start, seg);
  const int32_t want[] = {0, 0, 2, 2, 2, 0, 1, 1, 3, 3};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(start->i32()[i], want[i]);
}

TEST(Elementwise, CastsAndAddsColumnBlocks) {
  CpuStream s;
  Buffer a({3, 8}), b({3, 4}, DType::bf16), c({3, 4});
  a.normal(1);
  copy_cast(s, b, (*a).columns(4, 4));
  copy_cast(s, c, b);
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < 4; ++i) EXPECT_EQ(c[r * 4 + i], static_cast<float>(bf16(a[r * 8 + 4 + i])));
  add_into(s, c, (*a).columns(0, 4), 2.f);
  EXPECT_EQ(c[5], static_cast<float>(bf16(a[13])) + 2.f * a[9]);
}
