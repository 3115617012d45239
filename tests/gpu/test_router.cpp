// The router on the GPU against the CPU.
#include <array>
#include <limits>

#include "gpu/support.h"
#include "kernels/router/router.h"

namespace kestrel::test {
namespace {

// Logits on a grid of eighths: many exact ties, and scores that are otherwise 1e-4 apart at least, so that the last bit
// of a sigmoid decides nothing.
void grid_logits(const Buffer& logits, uint64_t seed) {
  std::mt19937_64 rng(seed);
  for (int64_t i = 0; i < logits->numel(); ++i)
    logits.f()[i] = static_cast<float>(static_cast<int>(rng() % 49) - 24) / 8;
}

struct Shape {
  int64_t N, E, k, slots;
  bool threshold;
};
// One expert and thousands, k = 1 and k = E, registers of every size and the loop beyond them, few tokens and many;
// each of the three kernels on both sides of its limits (network: E 128, k 8; candidates: E 1024, k 19).
constexpr Shape kShapes[] = {
    {1, 1, 1, 1, false},      {3, 2, 1, 1, false},      {257, 7, 3, 3, false},     {64, 8, 8, 8, false},
    {1000, 64, 8, 8, false},  {333, 100, 6, 6, false},  {129, 256, 40, 40, false}, {77, 500, 9, 9, false},
    {65, 896, 16, 16, false}, {9, 1024, 33, 33, false}, {11, 1500, 17, 17, false}, {5000, 16, 2, 2, false},
    {300, 16, 2, 2, false},   {301, 32, 8, 8, false},   {1001, 64, 8, 8, false},   {203, 63, 8, 8, false},
    {211, 128, 8, 8, false},  {61, 129, 8, 8, false},   {67, 128, 9, 9, false},    {33, 256, 19, 19, false},
    {31, 256, 20, 20, false}, {6, 9001, 3, 3, false},   {12, 896, 16, 48, true},   {0, 4, 2, 2, false},
    {500, 64, 8, 16, true},   {41, 7, 2, 7, true},      {13, 1300, 5, 10, true}};

std::string name(const Shape& s) {
  return text("N ", s.N, " E ", s.E, " k ", s.k, " slots ", s.slots, s.threshold ? " threshold" : "");
}

TEST(GpuRouter, ChoosesWhatTheCpuChooses) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Shape& shape : kShapes) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(name(shape) + (masked ? " masked" : ""));
      const int64_t N = shape.N, E = shape.E, slots = shape.slots;
      Routing r;
      r.experts = E, r.k = shape.k, r.slots = slots, r.threshold = shape.threshold;
      r.renormalize = !masked, r.scaling = 1.5f;
      Buffer logits({N, E}), bias({E}), index({N, slots}, DType::i32), load({E}, DType::i32);
      Buffer weight({N, slots}), score({N, slots}), cutoff({N}), dweight({N, slots}), dlogits({N, E});
      Buffer valid({N}, DType::u8);
      grid_logits(logits, 7);
      if (N > 2 && E > 2) {
        logits[E + 1] = std::numeric_limits<float>::quiet_NaN();
        for (int64_t e = 0; e < E; ++e) logits[2 * E + e] = std::numeric_limits<float>::quiet_NaN();
      }
      for (int64_t e = 0; e < E; ++e)
        bias[e] = static_cast<float>(e * 5 % 7) * 0.0371f - (shape.threshold ? 0.7f : 0.1f);
      for (int64_t n = 0; n < N; ++n) valid->as<uint8_t>()[n] = static_cast<uint8_t>(n % 5 != 3);
      dweight.normal(3);
      for (int64_t e = 0; e < E; ++e) load->i32()[e] = 3;  // added to
      DeviceBuffer xlogits(logits, DType::f32, 3, 2), xbias(bias->view({1, E}), DType::f32), xload({E}, DType::i32);
      DeviceBuffer xvalid({N}, DType::u8);
      xload.upload(load->view({1, E}));
      xvalid.upload(valid->view({1, N}));
      const Tensor mask = masked ? *valid : Tensor(), xmask = masked ? device_vector(xvalid) : Tensor();

      route_forward(cpu, r, index, weight, score, shape.threshold ? Tensor() : *cutoff, load, logits, bias, mask);
      DeviceBuffer xindex({N, slots}, DType::i32, 1, 2), xweight({N, slots}), xscore({N, slots}, DType::f32, 0, 1);
      DeviceBuffer xcutoff({N});
      cuda.run([&](Stream& s) {
        route_forward(s, r, xindex, xweight, xscore, shape.threshold ? Tensor() : *xcutoff, xload, xlogits,
                      device_vector(xbias), xmask);
      });
      expect_equal("index", xindex, integers(index));
      expect_equal("load", xload, integers(load->view({1, E})));
      // NaN weights (row 1 may choose, row 2 must choose a NaN) compare as NaN; the others within the rounding of a
      // sigmoid and a quotient.
      const auto same = [&](const char* what, const DeviceBuffer& got, const Tensor& want) {
        const std::vector<float> g = got.values();
        for (int64_t i = 0; i < want.numel(); ++i) {
          const float w = want.f32()[i], x = g[static_cast<size_t>(i)];
          if (std::isnan(w) ? !std::isnan(x)
                            : (std::isinf(w) ? x != w : !(std::fabs(x - w) <= 1e-6f * (1 + std::fabs(w))))) {
            ADD_FAILURE() << what << "[" << i << "] is " << x << ", expected " << w;
            return;
          }
        }
      };
      same("score", xscore, score);
      same("weight", xweight, weight);
      if (!shape.threshold) same("cutoff", xcutoff, cutoff);

      // Backward from the CPU's own choice, without the NaN rows' scores.
      for (int64_t i = 0; i < N * slots; ++i) {
        if (std::isnan(score[i])) score[i] = 0.25f;
      }
      route_backward(cpu, r, dlogits, dweight, index, score);
      DeviceBuffer hindex({N, slots}, DType::i32), hscore(score, DType::f32), hdweight(dweight, DType::f32);
      hindex.upload(index);
      DeviceBuffer xdlogits({N, E}, DType::f32, 1, 0);
      cuda.run([&](Stream& s) { route_backward(s, r, xdlogits, hdweight, hindex, hscore); });
      expect_close("dlogits", xdlogits, dlogits, 1e-5);  // sums of up to 40 terms in F32, the same order, with FMA
    }
  }
}

TEST(GpuRouter, AuxiliaryLoss) {
  CudaStream cuda;
  CpuStream cpu;
  for (const auto& [N, E, k] :
       {std::array<int64_t, 3>{1, 4, 2}, {63, 7, 3}, {64, 64, 8}, {1000, 96, 6}, {200, 896, 16}}) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(text("N ", N, " E ", E, " k ", k, masked ? " masked" : ""));
      Buffer logits({N, E}), dlogits({N, E}), load({E}, DType::i32), loss({1}), valid({N}, DType::u8);
      logits.normal(1, 2.f);
      dlogits.normal(2, 1e-4f);
      loss[0] = 0.125f;
      std::mt19937 rng(3);
      for (int64_t e = 0; e < E; ++e)
        load->i32()[e] = static_cast<int32_t>(rng() % static_cast<unsigned>(2 * N * k / E + 1));
      for (int64_t n = 0; n < N; ++n) valid->as<uint8_t>()[n] = static_cast<uint8_t>(n % 3 != 1);
      DeviceBuffer xlogits(logits, DType::f32), xdlogits(dlogits, DType::f32, 2, 1), again(dlogits, DType::f32, 2, 1);
      DeviceBuffer xload({E}, DType::i32), xloss({1}), xvalid({N}, DType::u8), loss_again({1});
      xload.upload(load->view({1, E}));
      xvalid.upload(valid->view({1, N}));
      xloss.upload(loss->view({1, 1}));
      loss_again.upload(loss->view({1, 1}));
      aux_loss(cpu, 0.01f, 0.5f, loss, dlogits, logits, load, k, masked ? *valid : Tensor());
      const Tensor mask = masked ? device_vector(xvalid) : Tensor();
      cuda.run([&](Stream& s) { aux_loss(s, 0.01f, 0.5f, xloss, xdlogits, xlogits, xload, k, mask); });
      cuda.run([&](Stream& s) { aux_loss(s, 0.01f, 0.5f, loss_again, again, xlogits, xload, k, mask); });
      expect_close("loss", xloss, loss->view({1, 1}), 1e-5);
      expect_close("dlogits", xdlogits, dlogits, 1e-5);  // sums over E in another order
      expect_same_bits("loss again", xloss, loss_again);
      expect_same_bits("dlogits again", xdlogits, again);
    }
  }
}

// Logits without ties, where the quick paths of the kernels are taken.  A score differs from the CPU's by a few units
// in its last place, so a choice may differ only between experts whose biased scores are that close.
TEST(GpuRouter, ChoosesAmongDistinctScores) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Shape& shape : kShapes) {
    if (shape.N == 0) continue;
    SCOPED_TRACE(name(shape));
    const int64_t N = shape.N, E = shape.E, slots = shape.slots;
    Routing r;
    r.experts = E, r.k = shape.k, r.slots = slots, r.threshold = shape.threshold;
    Buffer logits({N, E}), bias({E}), index({N, slots}, DType::i32), load({E}, DType::i32);
    Buffer weight({N, slots}), score({N, slots}), cutoff({N});
    logits.normal(11, 1.5f);
    bias.normal(12, 0.05f, shape.threshold ? -0.8f : 0.f);
    load.zero();
    route_forward(cpu, r, index, weight, score, shape.threshold ? Tensor() : *cutoff, load, logits, bias);
    const auto biased = [&](int64_t n, int32_t e) {
      return 1 / (1 + std::exp(-double{logits[n * E + e]})) + double{bias[e]};
    };
    // Aligned and dense, as in a model, and as a column block.
    for (const int64_t pad : {0, 1}) {
      SCOPED_TRACE(text("pad ", pad));
      DeviceBuffer xlogits(logits, DType::f32, 4 * pad, 3 * pad), xbias(bias->view({1, E}), DType::f32);
      DeviceBuffer xindex({N, slots}, DType::i32, pad, pad), xweight({N, slots}, DType::f32, pad),
          xload({E}, DType::i32);
      DeviceBuffer xscore({N, slots}, DType::f32, 0, pad), xcutoff({N}), index2({N, slots}, DType::i32);
      DeviceBuffer weight2({N, slots}), score2({N, slots}), cutoff2({N}), load2({E}, DType::i32);
      xload.zero();
      load2.zero();
      cuda.run([&](Stream& s) {
        route_forward(s, r, xindex, xweight, xscore, shape.threshold ? Tensor() : *xcutoff, xload, xlogits,
                      device_vector(xbias));
        route_forward(s, r, index2, weight2, score2, shape.threshold ? Tensor() : *cutoff2, load2, xlogits,
                      device_vector(xbias));
      });
      EXPECT_EQ(cuda.scratch(), 0);
      const std::vector<float> got = xindex.values(), loads = xload.values(), w = xweight.values();
      std::vector<int64_t> counted(static_cast<size_t>(E));
      int64_t other = 0;
      for (int64_t i = 0; i < N * slots; ++i) {
        const int32_t a = static_cast<int32_t>(got[static_cast<size_t>(i)]), b = index->i32()[i];
        ASSERT_TRUE(a >= -1 && a < E) << "index " << a << " in " << i;
        if (a >= 0) ++counted[static_cast<size_t>(a)];
        if (a == b) {
          // Within the rounding of a sigmoid and a quotient.
          EXPECT_NEAR(w[static_cast<size_t>(i)], weight[i], 2e-6f) << "weight " << i;
          continue;
        }
        ++other;
        // 2.5e-7: two scores below 1 and their sums with the bias, each off by up to two units of 2^-24.
        const double x = a < 0 ? 0 : biased(i / slots, a), y = b < 0 ? 0 : biased(i / slots, b);
        EXPECT_LE(std::fabs(x - y), 2.5e-7)
            << "token " << i / slots << " slot " << i % slots << ": " << a << " for " << b;
      }
      // Close calls are one in some ten thousand.
      EXPECT_LE(other, 2 + N * slots / 500);
      for (int64_t e = 0; e < E; ++e) {
        EXPECT_EQ(loads[static_cast<size_t>(e)], static_cast<float>(counted[static_cast<size_t>(e)])) << "expert " << e;
      }
      if (!shape.threshold && shape.k < E) expect_close("cutoff", xcutoff, cutoff, 1e-6);  // a sigmoid and a sum
      expect_same_bits("index again", xindex, index2);
      expect_same_bits("weight again", xweight, weight2);
      expect_same_bits("score again", xscore, score2);
      expect_same_bits("load again", xload, load2);
      if (!shape.threshold) expect_same_bits("cutoff again", xcutoff, cutoff2);
    }
  }
}

}  // namespace
}  // namespace kestrel::test
