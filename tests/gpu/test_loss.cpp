// Cross entropy on the GPU against the CPU.
#include "gpu/support.h"
#include "kernels/loss/loss.h"
#include "kernels/loss/loss_cuda.h"

namespace kestrel::test {
namespace {

struct Shape {
  int64_t N, D, V, pad;
};
constexpr Shape kShapes[] = {{1, 1, 1, 0},      {5, 3, 2, 0},      {33, 17, 50, 3},  {67, 24, 1021, 0},
                             {130, 64, 512, 8}, {40, 16, 9000, 0}, {12, 8, 33000, 0}};

void fill_targets(const Buffer& targets, int64_t V) {
  std::mt19937_64 rng(4);
  for (int64_t i = 0; i < targets->numel(); ++i) {
    targets->i32()[i] = i % 7 == 3 ? kIgnoreTarget : static_cast<int32_t>(rng() % static_cast<uint64_t>(V));
  }
}

struct Linear {
  Buffer x, w, targets, losses, dx, dw;
  Linear(const Shape& c, DType t)
      : x({c.N, c.D}), w({c.V, c.D}), targets({c.N}, DType::i32), losses({c.N}), dx({c.N, c.D}), dw({c.V, c.D}) {
    x.normal(1);
    w.normal(2, 0.7f / std::sqrt(static_cast<float>(c.D)));  // logits of size 0.7, so the loss is near log V
    dw.normal(3, 0.01f);
    round_to(t, x);
    round_to(t, w);
    fill_targets(targets, c.V);
  }
};

// BF16: the logits are rounded to 8 bits, 2^-9 of values up to 3, so a loss moves by up to 6e-3 absolute, less than
// that of log V >= 0.7 in the mean square.  A probability inherits the errors of the logits as a relative one of up to
// 6e-3, which p - 1 enlarges where p is near 1, and is rounded to 8 bits once more.
double loss_bound(DType t) {
  return t == DType::bf16 ? 5e-3 : 1e-5;
}
double gradient_bound(DType t) {
  return t == DType::bf16 ? 1.5e-2 : 2e-5;
}

void run_linear(CudaStream& cuda, CpuStream& cpu, const Shape& c, DType t) {
  Linear p(c, t);
  const float scale = 1.f / static_cast<float>(c.N);
  DeviceBuffer xx(p.x, t, c.pad, 0), xw(p.w, t, 0, c.pad), xtargets({c.N}, DType::i32), xlosses({c.N});
  DeviceBuffer xdx({c.N, c.D}, t, 0, c.pad), xdw(p.dw, DType::f32), again_dw(p.dw, DType::f32), again({c.N});
  xtargets.upload(p.targets->view({1, c.N}).view({c.N}));
  linear_cross_entropy(cpu, p.losses, p.dx, p.dw, p.x, p.w, p.targets, scale);
  cuda.run([&](Stream& s) {
    linear_cross_entropy(s, xlosses, xdx, xdw, xx, xw, xtargets, scale);
    linear_cross_entropy(s, again, {}, again_dw, xx, xw, xtargets, scale);
  });
  expect_close("losses", xlosses, p.losses->view({1, c.N}), loss_bound(t));
  // One token of the vocabulary: the gradient is 0 but for rounding, which is measured against grad_scale.
  if (c.V > 1) {
    expect_close("dx", xdx, p.dx, gradient_bound(t));
    expect_close("dw", xdw, p.dw, gradient_bound(t));
  }
  expect_same_bits("losses without dx", xlosses, again);
  expect_same_bits("dw without dx", xdw, again_dw);
  // evaluation: no gradient
  DeviceBuffer evaluated({c.N});
  cuda.run([&](Stream& s) { linear_cross_entropy(s, evaluated, {}, {}, xx, xw, xtargets, 0.f); });
  expect_same_bits("losses without gradients", xlosses, evaluated);
}

TEST(GpuLoss, Linear) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const Shape& c : kShapes) {
      SCOPED_TRACE(text(name_of(t), " N ", c.N, " D ", c.D, " V ", c.V, " padded ", c.pad));
      run_linear(cuda, cpu, c, t);
    }
  }
}

// K3's vocabulary; more rows than one block of logits holds.
TEST(GpuLoss, SeveralBlocksOfRows) {
  CudaStream cuda;
  CpuStream cpu;
  const Shape c{1600, 4, 163840, 0};
  ASSERT_LT(cuda::logit_rows(c.N, c.V, DType::bf16), c.N);
  run_linear(cuda, cpu, c, DType::bf16);
  EXPECT_LE(cuda.scratch(), int64_t{513} << 20);
}

TEST(GpuLoss, BlocksAreNearlyEqual) {
  EXPECT_EQ(cuda::logit_rows(32768, 32768, DType::bf16), 8192);
  EXPECT_EQ(cuda::logit_rows(9000, 32768, DType::bf16), 4608);  // two blocks, not 8192 + 808
  EXPECT_EQ(cuda::logit_rows(7, 32768, DType::bf16), 7);
  EXPECT_EQ(cuda::logit_rows(0, 32768, DType::bf16), 0);
  EXPECT_EQ(cuda::logit_rows(1000, int64_t{1} << 40, DType::bf16), 128);
}

TEST(GpuLoss, PlainFormInPlaceAndOutOfRangeTargets) {
  CudaStream cuda;
  CpuStream cpu;
  for (const auto& [N, V, pad] : {std::array<int64_t, 3>{1, 1, 0}, {3, 5, 1}, {20, 1000, 0}, {9, 20000, 8}}) {
    SCOPED_TRACE(text("N ", N, " V ", V, " padded ", pad));
    Buffer logits({N, V}), targets({N}, DType::i32), losses({N}), d({N, V});
    logits.normal(1, 20.f);  // peaked: the largest logit must be taken out before the exponential
    fill_targets(targets, V);
    DeviceBuffer xz(logits, DType::f32, pad, 0), xt({N}, DType::i32), xl({N}), xd({N, V}, DType::f32, 0, pad), l2({N});
    xt.upload(targets);
    cross_entropy(cpu, losses, d, logits, targets, 0.25f);
    cuda.run([&](Stream& s) { cross_entropy(s, xl, xd, xz, xt, 0.25f); });
    // The sum of exponentials is 1 + rounding where one logit dominates: absolute errors of 1e-6 beside losses of 40.
    expect_close("losses", xl, losses->view({1, N}), 1e-5);
    if (V > 1) expect_close("dlogits", xd, d, 1e-5);
    cuda.run([&](Stream& s) { cross_entropy(s, l2, xz, xz, xt, 0.25f); });
    expect_same_bits("losses in place", l2, xl);
    expect_same_bits("dlogits in place", xz, xd);

    // A target outside the vocabulary makes its own row NaN, loss and gradient, and no other.
    targets->i32()[0] = static_cast<int32_t>(V);
    xt.upload(targets);
    xz.upload(logits);
    cuda.run([&](Stream& s) { cross_entropy(s, l2, xd, xz, xt, 0.25f); });
    const std::vector<float> loss = l2.values(), gradient = xd.values();
    EXPECT_TRUE(std::isnan(loss[0]) && std::isnan(gradient[0]));
    for (size_t n = 1; n < loss.size(); ++n) EXPECT_TRUE(std::isfinite(loss[n])) << n;
  }
}

}  // namespace
}  // namespace kestrel::test
