// The router and its balancing on the GPU against the CPU.
#include <limits>

#include "gpu/support.h"
#include "kernels/router/balancing.h"
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

Tensor device_vector(const DeviceBuffer& b) {
  return b->view({b->numel()});
}

std::vector<int32_t> integers(const Tensor& t) {
  std::vector<int32_t> v;
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) v.push_back(t.i32()[r * t.ld + c]);
  }
  return v;
}

struct Shape {
  int64_t N, E, k, slots;
  bool threshold;
};
// One expert and thousands, k = 1 and k = E, registers of every size and the loop beyond them, few tokens and many.
constexpr Shape kShapes[] = {
    {1, 1, 1, 1, false},      {3, 2, 1, 1, false},      {257, 7, 3, 3, false},     {64, 8, 8, 8, false},
    {1000, 64, 8, 8, false},  {333, 100, 6, 6, false},  {129, 256, 40, 40, false}, {77, 500, 9, 9, false},
    {65, 896, 16, 16, false}, {9, 1024, 33, 33, false}, {11, 1500, 17, 17, false}, {5000, 16, 2, 2, false},
    {0, 4, 2, 2, false},      {500, 64, 8, 16, true},   {41, 7, 2, 7, true},       {13, 1300, 5, 10, true}};

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

// Counts differ from the CPU's only where a score's last bit crosses the edge of a bin: into the bin beside it.
void expect_same_counts(const DeviceBuffer& got, const Tensor& want) {
  const std::vector<float> g = got.values();
  for (int64_t e = 0; e < want.rows(); ++e) {
    int64_t before = 0, moved = 0, total = 0;
    for (int64_t b = 0; b < want.cols(); ++b) {
      const int64_t i = e * want.cols() + b;
      before += static_cast<int64_t>(g[static_cast<size_t>(i)]) - want.i32()[e * want.ld + b];
      moved += std::abs(before);
      total += want.i32()[e * want.ld + b];
    }
    EXPECT_EQ(before, 0) << "expert " << e << ": counts lost or made";
    EXPECT_LE(moved, 1 + total / 1000) << "expert " << e << ": counts in other bins";
  }
}

TEST(GpuBalancing, HistogramsAndTheBiasesFromThem) {
  CudaStream cuda;
  CpuStream cpu;
  // Bins in shared memory and too many for it.
  for (const auto& [N, E, k, bins] : {std::array<int64_t, 4>{1, 2, 1, 10},
                                      {3000, 64, 8, 1000},
                                      {500, 13, 3, 7},
                                      {700, 896, 16, 1000},
                                      {400, 9, 2, 5000}}) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(text("N ", N, " E ", E, " k ", k, " bins ", bins, masked ? " masked" : ""));
      Buffer logits({N, E}), cutoff({N}), bias({E}), valid({N}, DType::u8), hist({E, bins}, DType::i32);
      Buffer scores({E, bins}, DType::i32), dynamic({E});
      logits.normal(1, 1.5f);
      if (E > 3 && N > 3) logits[2 * E + 3] = std::numeric_limits<float>::quiet_NaN();
      cutoff.normal(2, 0.1f, 0.7f);
      bias.normal(3, 0.2f);
      dynamic.normal(4, 0.2f);
      for (int64_t n = 0; n < N; ++n) valid->as<uint8_t>()[n] = static_cast<uint8_t>(n % 3 != 1);
      std::memset(hist->data, 0, static_cast<size_t>(hist->bytes()));
      std::memset(scores->data, 0, static_cast<size_t>(scores->bytes()));
      DeviceBuffer xlogits(logits, DType::f32, 1, 0), xcutoff(cutoff->view({1, N}), DType::f32);
      DeviceBuffer xbias(bias->view({1, E}), DType::f32), xvalid({N}, DType::u8),
          xdynamic(dynamic->view({1, E}), DType::f32);
      DeviceBuffer xhist({E, bins}, DType::i32), xscores({E, bins}, DType::i32);
      xvalid.upload(valid->view({1, N}));
      xhist.zero();
      xscores.zero();
      const Tensor mask = masked ? *valid : Tensor(), xmask = masked ? device_vector(xvalid) : Tensor();
      quantile_histogram(cpu, hist, logits, cutoff, bias, mask);
      score_histogram(cpu, scores, logits, mask);
      cuda.run([&](Stream& s) {
        quantile_histogram(s, xhist, xlogits, device_vector(xcutoff), device_vector(xbias), xmask);
        score_histogram(s, xscores, xlogits, xmask);
      });
      expect_same_counts(xhist, hist);
      expect_same_counts(xscores, scores);

      // From the same counts the same bits.
      xhist.upload(hist);
      xscores.upload(scores);
      quantile_solve(cpu, bias, hist, k, 0.75f);
      dynamic_solve(cpu, dynamic, scores, k, 0.9f);
      cuda.run([&](Stream& s) {
        quantile_solve(s, device_vector(xbias), xhist, k, 0.75f);
        dynamic_solve(s, device_vector(xdynamic), xscores, k, 0.9f);
      });
      // One rounding of an fp64 value to F32; a different last bit of the fp64 value may show.
      expect_close("bias", xbias, bias->view({1, E}), 1e-7);
      expect_close("dynamic bias", xdynamic, dynamic->view({1, E}), 1e-7);
    }
  }
}

TEST(GpuBalancing, OrderStatisticsAndTheSignRule) {
  CudaStream cuda;
  CpuStream cpu;
  for (const auto& [N, E, k] : {std::array<int64_t, 3>{1, 2, 1}, {1000, 64, 8}, {777, 13, 5}, {64, 200, 16}}) {
    for (const bool centre : {false, true}) {
      SCOPED_TRACE(text("N ", N, " E ", E, " k ", k, centre ? " centred" : ""));
      Buffer logits({N, E}), cutoff({N}), m({N, E}), b_hat({E}), bias({E}), load({E}, DType::i32);
      logits.normal(1, 1.5f);
      cutoff.normal(2, 0.1f, 0.7f);
      b_hat.normal(5);
      bias.normal(6);
      std::mt19937 rng(3);
      for (int64_t e = 0; e < E; ++e) load->i32()[e] = static_cast<int32_t>(rng() % 5);
      margins(cpu, m, logits, cutoff);
      DeviceBuffer xlogits(logits, DType::f32), xcutoff(cutoff->view({1, N}), DType::f32), xm({N, E}, DType::f32, 2, 1);
      DeviceBuffer xb_hat(b_hat->view({1, E}), DType::f32), xbias(bias->view({1, E}), DType::f32),
          xload({E}, DType::i32);
      xload.upload(load->view({1, E}));
      cuda.run([&](Stream& s) { margins(s, xm, xlogits, device_vector(xcutoff)); });
      expect_close("margins", xm, m, 1e-6);  // a sigmoid each

      // Column 1 holds no number, and ties abound: rounded to eighths.
      for (int64_t i = 0; i < m->numel(); ++i) m[i] = std::round(m[i] * 8) / 8;
      for (int64_t n = 0; n < N; ++n) m[n * E + 1] = std::numeric_limits<float>::quiet_NaN();
      xm.upload(m);
      exact_solve(cpu, b_hat, m, k, centre);
      sign_solve(cpu, bias, load, 1e-3f);
      cuda.run([&](Stream& s) {
        exact_solve(s, device_vector(xb_hat), xm, k, centre);
        sign_solve(s, device_vector(xbias), xload, 1e-3f);
      });
      expect_close("b_hat", xb_hat, b_hat->view({1, E}), 1e-7);  // the same fp64 sum, rounded once
      expect_close("bias", xbias, bias->view({1, E}), 1e-7);
    }
  }
}

}  // namespace
}  // namespace kestrel::test
