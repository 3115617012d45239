// The balancing of the router on the GPU against the CPU.
#include <array>
#include <limits>

#include "gpu/support.h"
#include "kernels/router/balancing.h"

namespace kestrel::test {
namespace {

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
  // Bins in shared memory, in more of it than a block may have unasked, and too many for it.
  for (const auto& [N, E, k, bins] : {std::array<int64_t, 4>{1, 2, 1, 10},
                                      {3000, 64, 8, 1000},
                                      {500, 13, 3, 7},
                                      {700, 896, 16, 1000},
                                      {900, 24, 4, 1536},
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

// Logits whose scores are exact on both sides: 0 gives 1/2, +-200 give 1 and 0.  Then every margin is the same number
// on both, and so must every count be: NaN, endless cutoffs, bin edges, a NaN bias in front or behind.
TEST(GpuBalancing, CountsOfExactScoresAreEqual) {
  CudaStream cuda;
  CpuStream cpu;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  const int64_t N = 1500, E = 20, bins = 64;
  for (const int nan_bias : {-1, 0, 7}) {
    SCOPED_TRACE(text("NaN bias at ", nan_bias));
    Buffer logits({N, E}), cutoff({N}), bias({E}), hist({E, bins}, DType::i32), scores({E, bins}, DType::i32);
    std::mt19937 rng(5);
    for (int64_t i = 0; i < N * E; ++i) logits[i] = std::array{0.f, 200.f, -200.f, kNan}[rng() % 4];
    for (int64_t n = 0; n < N; ++n)
      cutoff[n] = n % 50 == 3 ? kNan : (n % 50 == 4 ? -kInf : 0.125f * static_cast<float>(rng() % 9));
    for (int64_t e = 0; e < E; ++e) bias[e] = 0.25f * static_cast<float>(static_cast<int>(rng() % 5) - 2);
    if (nan_bias >= 0) bias[nan_bias] = kNan;
    for (int64_t i = 0; i < E * bins; ++i) hist->i32()[i] = scores->i32()[i] = static_cast<int32_t>(i % 3);  // added to
    DeviceBuffer xlogits(logits, DType::f32, 1, 2), xcutoff(cutoff->view({1, N}), DType::f32);
    DeviceBuffer xbias(bias->view({1, E}), DType::f32), xhist({E, bins}, DType::i32, 1, 1),
        xscores({E, bins}, DType::i32);
    xhist.upload(hist);
    xscores.upload(scores);
    quantile_histogram(cpu, hist, logits, cutoff, bias);
    score_histogram(cpu, scores, logits);
    cuda.run([&](Stream& s) {
      quantile_histogram(s, xhist, xlogits, device_vector(xcutoff), device_vector(xbias));
      score_histogram(s, xscores, xlogits);
    });
    const auto all = [](const Buffer& b) { return std::vector<int32_t>(b->i32(), b->i32() + b->numel()); };
    expect_equal("hist", xhist, all(hist));
    expect_equal("scores", xscores, all(scores));
  }
}

// Selection moves no bit: without the mean the answer is one of the margins, negated.
TEST(GpuBalancing, OrderStatisticsAreEqual) {
  CudaStream cuda;
  CpuStream cpu;
  for (const auto& [N, E, k] :
       {std::array<int64_t, 3>{0, 3, 1}, {1, 2, 1}, {5000, 33, 4}, {257, 896, 16}, {999, 7, 6}}) {
    for (const bool ties : {false, true}) {
      SCOPED_TRACE(text("N ", N, " E ", E, " k ", k, ties ? " ties" : ""));
      Buffer m({N, E}), b_hat({E});
      m.normal(21);
      b_hat.normal(22);
      for (int64_t i = 0; i < m->numel(); ++i) {
        if (ties) m[i] = std::round(m[i] * 2) / 2;  // -0 and +0 among them
        if (i % 11 == 5) m[i] = std::numeric_limits<float>::quiet_NaN();
        if (i % 13 == 5) m[i] = (i % 2 != 0 ? 1.f : -1.f) * std::numeric_limits<float>::infinity();
      }
      DeviceBuffer xm(m, DType::f32, 1, 1), xb_hat(b_hat->view({1, E}), DType::f32),
          again(b_hat->view({1, E}), DType::f32);
      exact_solve(cpu, b_hat, m, k, false);
      cuda.run([&](Stream& s) {
        exact_solve(s, device_vector(xb_hat), xm, k, false);
        exact_solve(s, device_vector(again), xm, k, false);
      });
      DeviceBuffer want(b_hat->view({1, E}), DType::f32);
      expect_same_bits("b_hat", xb_hat, want);
      expect_same_bits("b_hat again", again, xb_hat);
    }
  }
}

}  // namespace
}  // namespace kestrel::test
