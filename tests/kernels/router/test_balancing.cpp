#include <omp.h>

#include <algorithm>
#include <limits>

#include "kernels/router/balancing.h"
#include "kernels/router/balancing_cpu.h"
#include "kernels/router/router.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::Buffer;
using test::CpuStream;

constexpr int64_t kArena = int64_t{64} << 20;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

double worst(const Tensor& a, const Tensor& b) {
  double d = 0;
  for (int64_t i = 0; i < b.numel(); ++i) {
    const double e = std::fabs(double{a.f32()[i]} - double{b.f32()[i]});
    d = e <= d ? d : e;  // a NaN stays
  }
  return d;
}

// One update from a fixture's scores: counts against its counts, next bias against its next bias.
void check_fixture(const std::string& name, int64_t k, bool erase_middle) {
  const auto f = test::fixture(name);
  const Tensor scores = f.tensor("scores"), bias = f.tensor("bias"), want = f.tensor("hist");
  const int64_t E = want.rows(), bins = want.cols();
  Buffer hist({E, bins}, DType::i32);
  hist.zero();
  cpu::quantile_histogram(hist, scores, cpu::Input::scores, f.tensor("alpha"), bias, {});
  int64_t moved = 0;
  for (int64_t e = 0; e < E; ++e) {
    int64_t total = 0;
    for (int64_t b = 0; b < bins; ++b) {
      const int64_t d = hist->i32()[e * bins + b] - want.i32()[e * bins + b];
      total += hist->i32()[e * bins + b];
      if (erase_middle && e == E / 2) continue;
      moved += std::abs(d);
    }
    EXPECT_EQ(total, scores.rows());
  }
  // A margin within fp32 rounding of a bin edge lands next door: two counts off by one.  The margins number N E <= 8192
  // and an edge's neighbourhood of 1e-7 is 5e-5 of a bin, plus the cutoff experts of a zero bias that sit on an edge.
  EXPECT_LE(moved, 4) << name;
  CpuStream s(kArena);
  Buffer next({E}), from_ours({E});
  next.copy(bias);
  from_ours.copy(bias);
  quantile_solve(s, next, want, k, 1.f);
  EXPECT_LE(worst(next, f.tensor("next_bias")), 3e-7) << name;  // lo and per_unit are fp32: an ulp of 1.2
  if (erase_middle) std::fill_n(hist->i32() + (E / 2) * bins, bins, 0);
  quantile_solve(s, from_ours, hist, k, 1.f);
  // a count that moved across an edge moves the answer by less than a bin
  EXPECT_LE(worst(from_ours, f.tensor("next_bias")), moved == 0 ? 3e-7 : 3.0 / static_cast<double>(bins)) << name;
}

TEST(Balancing, QuantileFixtures) {
  check_fixture("quantile_balancing", 3, false);
  check_fixture("quantile_balancing_first_step", 3, false);
  check_fixture("quantile_balancing_fraction", 5, false);
  check_fixture("quantile_balancing_empty", 2, true);
}

TEST(Balancing, PooledFixture) {
  const auto f = test::fixture("quantile_balancing_pooled");
  Buffer zero({4}), next({4}), pooled({4, 10}, DType::i32);
  zero.zero();
  pooled.zero();
  CpuStream s(kArena);
  for (const char* rank : {"rank0", "rank1"}) {
    const Tensor scores = f.tensor(std::string("scores_") + rank);
    Buffer alpha({4}), hist({4, 10}, DType::i32);
    hist.zero();
    for (int64_t n = 0; n < 4; ++n) {  // k = 1 and no bias: the cutoff is the second largest score
      std::vector<float> row(scores.f32() + n * 4, scores.f32() + n * 4 + 4);
      std::sort(row.begin(), row.end());
      alpha[n] = row[2];
    }
    cpu::quantile_histogram(hist, scores, cpu::Input::scores, alpha, zero, {});
    cpu::quantile_histogram(pooled, scores, cpu::Input::scores, alpha, zero, {});
    EXPECT_TRUE(same_bits(hist, f.tensor(std::string("hist_") + rank)));
    next.zero();
    quantile_solve(s, next, hist, 1, 1.f);
    EXPECT_LE(worst(next, f.tensor(std::string("next_bias_") + rank + "_alone")), 3e-7);
  }
  next.zero();
  quantile_solve(s, next, pooled, 1, 1.f);
  EXPECT_LE(worst(next, f.tensor("next_bias")), 3e-7);  // fp32 bin edges
}

// The hand-worked case: two ranks whose answers, and the mean of whose answers, all differ from the pooled one.  Scores
// sit on bin edges (0 / 0.2), so it also pins floor((r - lo) * per_unit).
TEST(Balancing, PooledIsNotTheMeanOfRanks) {
  const float row[2][4] = {{.92f, .68f, .31f, .07f}, {.07f, .31f, .92f, .68f}};
  const float want[3][4] = {{-.5f, -.1f, .1f, .5f}, {.5f, .1f, -.5f, -.1f}, {-.2f, .2f, -.2f, .2f}};
  CpuStream s(kArena);
  Buffer pooled({4, 10}, DType::i32), zero({4});
  pooled.zero();
  zero.zero();
  for (int rank = 0; rank < 3; ++rank) {
    Buffer scores({4, 4}), alpha({4}), hist({4, 10}, DType::i32), next({4});
    hist.zero();
    next.zero();
    if (rank < 2) {
      for (int64_t n = 0; n < 4; ++n) {
        std::copy(row[rank], row[rank] + 4, scores.f() + 4 * n);
        alpha[n] = .68f;
      }
      cpu::quantile_histogram(hist, scores, cpu::Input::scores, alpha, zero, {});
      for (int64_t i = 0; i < 40; ++i) pooled->i32()[i] += hist->i32()[i];
    }
    quantile_solve(s, next, rank < 2 ? hist : pooled, 1, 1.f);
    for (int64_t e = 0; e < 4; ++e) EXPECT_NEAR(next[e], want[rank][e], 3e-7) << "rank " << rank << " expert " << e;
  }
}

struct Batch {
  int64_t N, E, k;
  Buffer logits, bias, cutoff, load, index, weight, score;
  Batch(int64_t n, int64_t e, int64_t k_, uint64_t seed)
      : N(n),
        E(e),
        k(k_),
        logits({n, e}),
        bias({e}),
        cutoff({n}),
        load({e}, DType::i32),
        index({n, k_}, DType::i32),
        weight({n, k_}),
        score({n, k_}) {
    logits.normal(seed);
    bias.normal(seed + 1, 0.1f);
  }
  void route(Tensor valid = {}) {
    CpuStream s(kArena);
    load.zero();
    route_forward(s, {E, k, k, false, true, 1.f}, index, weight, score, cutoff, load, logits, bias, valid);
  }
};

TEST(Balancing, EveryShardingGivesTheSameBits) {
  Batch b(240, 19, 4, 21);
  b.route();
  Buffer first({19, 100}, DType::i32), first_bias({19});
  const int threads = omp_get_max_threads();
  for (int64_t shards : {1, 2, 4, 240}) {
    omp_set_num_threads(shards % 4 == 0 ? 2 : 1);
    CpuStream s(kArena);
    Buffer hist({19, 100}, DType::i32), next({19});
    hist.zero();
    next.copy(b.bias);
    for (int64_t i = shards - 1; i >= 0; --i) {  // another order too
      const int64_t n = b.N / shards;
      quantile_histogram(s, hist, b.logits->slice(i * n, n), b.cutoff->slice(i * n, n), b.bias);
    }
    quantile_solve(s, next, hist, 4, 1.f);
    if (shards == 1) {
      first.copy(hist);
      first_bias.copy(next);
    }
    EXPECT_TRUE(same_bits(hist, first));
    EXPECT_TRUE(same_bits(next, first_bias));
  }
  omp_set_num_threads(threads);
}

TEST(Balancing, PaddingIsCountedNowhere) {
  for (int64_t E : {64, 17}) {  // N == E once: a mask on the wrong axis would still fit
    Batch whole(64, E, 3, 31), half(32, E, 3, 31);
    half.bias.copy(whole.bias);
    Buffer valid({64}, DType::u8);
    for (int64_t n = 0; n < 64; ++n) {
      valid->as<uint8_t>()[n] = n % 2 == 0;
      if (n % 2 == 0) std::copy_n(whole.logits.f() + n * E, E, half.logits.f() + n / 2 * E);
    }
    whole.route(valid);
    half.route();
    CpuStream s(kArena);
    Buffer a({E, 50}, DType::i32), b({E, 50}, DType::i32), forgot({E, 50}, DType::i32);
    quantile_histogram(s, a.zero(), whole.logits, whole.cutoff, whole.bias, valid);
    quantile_histogram(s, b.zero(), half.logits, half.cutoff, half.bias);
    quantile_histogram(s, forgot.zero(), whole.logits, whole.cutoff, whole.bias);  // NaN cutoffs: same counts
    EXPECT_TRUE(same_bits(a, b));
    EXPECT_TRUE(same_bits(forgot, b));
    EXPECT_TRUE(same_bits(whole.load, half.load));
    score_histogram(s, a.zero(), whole.logits, valid);
    score_histogram(s, b.zero(), half.logits);
    EXPECT_TRUE(same_bits(a, b));
    Buffer ma({64, E}), mb({32, E}), ba({E}), bb({E});
    margins(s, ma, whole.logits, whole.cutoff, valid);
    margins(s, mb, half.logits, half.cutoff);
    exact_solve(s, ba, ma, 3, true);
    exact_solve(s, bb, mb, 3, true);
    EXPECT_TRUE(same_bits(ba, bb));
  }
}

// r lies in [min b - 1, max b + 1] by construction: the clamp is for rounding only, the outer bins stay empty.
TEST(Balancing, NoCountInTheOuterBins) {
  Batch b(300, 24, 4, 41);
  b.route();
  CpuStream s(kArena);
  Buffer hist({24, 1000}, DType::i32);
  quantile_histogram(s, hist.zero(), b.logits, b.cutoff, b.bias);
  for (int64_t e = 0; e < 24; ++e) {
    EXPECT_EQ(hist->i32()[e * 1000], 0);
    EXPECT_EQ(hist->i32()[e * 1000 + 999], 0);
  }
}

TEST(Balancing, ExactFixtures) {
  for (const char* name : {"quantile_balancing", "quantile_balancing_first_step"}) {
    const auto f = test::fixture(name);
    const Tensor scores = f.tensor("scores"), alpha = f.tensor("alpha");
    const int64_t N = scores.rows(), E = scores.cols();
    Buffer m({N, E}), b({E});
    for (int64_t i = 0; i < N * E; ++i) m[i] = scores.f32()[i] - alpha.f32()[i / E];
    CpuStream s(kArena);
    exact_solve(s, b, m, 3, true);
    EXPECT_LE(worst(b, f.tensor("next_bias_exact")), 3e-7) << name;  // margins rounded to fp32
  }
}

TEST(Balancing, ExactEqualsASort) {
  for (auto [N, E, k] : {std::array<int64_t, 3>{1, 2, 1}, {7, 3, 2}, {100, 17, 5}, {257, 40, 39}}) {
    Buffer m({N, E}), b({E});
    m.normal(static_cast<uint64_t>(N));
    for (int64_t i = 0; i < N * E; ++i) {
      if (i % 3 == 0) m[i] = std::round(m[i] * 2) / 2;  // ties, zeros, minus zeros
      if (i % 11 == 5 && N > 20) m[i] = std::numeric_limits<float>::quiet_NaN();
    }
    CpuStream s(kArena);
    exact_solve(s, b, m, k, false);
    for (int64_t e = 0; e < E; ++e) {
      std::vector<float> column;
      for (int64_t n = 0; n < N; ++n) {
        if (!std::isnan(m[n * E + e])) column.push_back(m[n * E + e]);
      }
      std::sort(column.begin(), column.end(), std::greater<>());
      EXPECT_EQ(b[e], -column[column.size() * static_cast<size_t>(k) / static_cast<size_t>(E)]) << N << " " << e;
    }
  }
}

// The histogram's answer lies within a bin of the exact one (both are then centred: two bins).
TEST(Balancing, HistogramIsWithinABinOfExact) {
  Batch b(4096, 32, 4, 51);
  b.route();
  CpuStream s(kArena);
  Buffer hist({32, 1000}, DType::i32), m({4096, 32}), next({32}), exact({32});
  next.copy(b.bias);
  quantile_histogram(s, hist.zero(), b.logits, b.cutoff, b.bias);
  quantile_solve(s, next, hist, 4, 1.f);
  margins(s, m, b.logits, b.cutoff);
  exact_solve(s, exact, m, 4, true);
  const auto [low, high] = std::minmax_element(b.bias.f(), b.bias.f() + 32);
  EXPECT_LE(worst(next, exact), 2 * (*high - *low + 2) / 1000);
}

// Margins 0.5 + N(0, 1): an empty column keeps what b_hat held.
TEST(Balancing, ColumnWithoutNumbersIsKept) {
  Buffer m({4, 2}), b({2});
  for (int64_t n = 0; n < 4; ++n) {
    m[2 * n] = static_cast<float>(n);
    m[2 * n + 1] = std::numeric_limits<float>::quiet_NaN();
  }
  b[1] = 0.25f;
  CpuStream s(kArena);
  exact_solve(s, b, m, 1, false);
  EXPECT_EQ(b[0], -1.f);  // q = 2: the third largest of 3 2 1 0
  EXPECT_EQ(b[1], 0.25f);
}

TEST(Balancing, GainMovesPartOfTheWay) {
  Batch b(512, 8, 2, 61);
  b.route();
  CpuStream s(kArena);
  Buffer hist({8, 1000}, DType::i32), full({8}), half({8});
  quantile_histogram(s, hist.zero(), b.logits, b.cutoff, b.bias);
  full.copy(b.bias);
  half.copy(b.bias);
  quantile_solve(s, full, hist, 2, 1.f);
  quantile_solve(s, half, hist, 2, 0.5f);
  double mean = 0;
  for (int64_t e = 0; e < 8; ++e) mean += b.bias[e] / 8;
  for (int64_t e = 0; e < 8; ++e) EXPECT_NEAR(half[e], 0.5 * (b.bias[e] - mean + full[e]), 2e-7);  // fp32 storage
  EXPECT_THROW(quantile_solve(s, half, hist, 2, 1.5f), ContractError);
}

TEST(Balancing, DynamicFixtures) {
  for (auto [name, k] : {std::pair<const char*, int64_t>{"quantile_balancing", 3},
                         {"quantile_balancing_first_step", 3},
                         {"quantile_balancing_fraction", 5}}) {
    const auto f = test::fixture(name);
    const Tensor scores = f.tensor("scores"), want = f.tensor("dynamic_beta_next");
    const int64_t E = scores.cols(), bins = 1000;
    Buffer hist({E, bins}, DType::i32), b({E}), b_hat({E});
    CpuStream s(kArena);
    exact_solve(s, b_hat, scores, k, false);
    cpu::score_histogram(hist.zero(), scores, cpu::Input::scores, {});
    for (int64_t e = 0; e < E; ++e) b[e] = -0.5f;
    dynamic_solve(s, b, hist, k, 0.9f);
    for (int64_t e = 0; e < E; ++e) {
      EXPECT_NEAR(-(0.9 * -0.5 + 0.1 * b_hat[e]), want.f32()[e], 1e-7);
      // a tenth of the distance between the interpolated quantile and the order statistic: with a few hundred tokens
      // neighbouring scores lie further apart than a bin, up to about 0.02 in these tails
      EXPECT_NEAR(-b[e], want.f32()[e], 0.1 * 0.02) << name << " expert " << e;
    }
  }
}

TEST(Balancing, ScoreHistogramBins) {
  const float scores[6] = {0.f, 0.0999f, 0.1001f, 0.9999f, 1.f, std::numeric_limits<float>::quiet_NaN()};
  Buffer hist({1, 10}, DType::i32);
  cpu::score_histogram(hist.zero(), Tensor::of(scores, {6, 1}), cpu::Input::scores, {});
  const int32_t want[10] = {2, 1, 0, 0, 0, 0, 0, 0, 0, 2};
  for (int64_t b = 0; b < 10; ++b) EXPECT_EQ(hist->i32()[b], want[b]);
}

// q = 1.5 of 6 from the top: one count above 0.8, so the half of the next bin of four: 0.8 - 0.125 * 0.2.
TEST(Balancing, DynamicInterpolatesFromTheTop) {
  Buffer hist({4, 5}, DType::i32), b({4});
  hist.zero();
  hist->i32()[4] = 1;
  hist->i32()[3] = 4;
  hist->i32()[0] = 1;
  for (int64_t e = 0; e < 4; ++e) b[e] = -0.3f;
  CpuStream s(kArena);
  dynamic_solve(s, b, hist, 1, 0.f);
  EXPECT_NEAR(b[0], -(0.8 - 0.125 * 0.2), 1e-6);
  EXPECT_EQ(b[1], -0.3f) << "no counts: kept";
}

TEST(Balancing, DynamicInitialBias) {
  // published quantiles, three decimals
  for (auto [E, k, z] : {std::tuple<int64_t, int64_t, double>{64, 4, 1.534}, {64, 8, 1.150}, {896, 16, 2.100}}) {
    EXPECT_NEAR(cpu::normal_upper_quantile(static_cast<double>(k) / static_cast<double>(E)), z, 6e-4);
    EXPECT_NEAR(dynamic_initial_bias(E, k, 0.7f), -1 / (1 + std::exp(-0.7 * z)), 1e-3);
  }
  EXPECT_NEAR(cpu::normal_upper_quantile(0.5), 0, 1e-15);
  EXPECT_NEAR(cpu::normal_upper_quantile(0.025), 1.959963984540054, 1e-12);
  EXPECT_NEAR(cpu::normal_upper_quantile(0.975), -1.959963984540054, 1e-12);
  EXPECT_NEAR(cpu::normal_upper_quantile(1e-9), 5.997807015007687, 1e-9);
  // and it does what it is for: about k of E fire on such logits
  const float b = dynamic_initial_bias(64, 8, 2.f);
  Buffer logits({2000, 64});
  logits.normal(71, 2.f);
  int64_t fired = 0;
  for (int64_t i = 0; i < logits->numel(); ++i) fired += 1 / (1 + std::exp(-logits[i])) + b > 0;
  EXPECT_NEAR(static_cast<double>(fired) / 2000, 8.0, 0.3);  // standard error 0.06
}

TEST(Balancing, SignRule) {
  Buffer bias({4}), load({4}, DType::i32);
  bias.zero();
  const int32_t loads[4] = {10, 3, 5, 2};  // mean 5
  std::copy(loads, loads + 4, load->i32());
  CpuStream s(kArena);
  sign_solve(s, bias, load, 0.01f);
  const double step[4] = {-0.01, 0.01, 0, 0.01};
  for (int64_t e = 0; e < 4; ++e) EXPECT_NEAR(bias[e], step[e] - 0.0025, 1e-8);  // minus the mean of the steps
}

TEST(Balancing, RefusesEveryExpertForEveryToken) {
  Buffer bias({4}), hist({4, 10}, DType::i32), m({3, 4});
  bias.zero();
  hist.zero();
  m.normal(1);
  CpuStream s(kArena);
  EXPECT_THROW(quantile_solve(s, bias, hist, 4, 1.f), ContractError);
  EXPECT_THROW(dynamic_solve(s, bias, hist, 4, 0.9f), ContractError);
  EXPECT_THROW(exact_solve(s, bias, m, 4, true), ContractError);
  EXPECT_THROW(dynamic_initial_bias(4, 4, 1.f), ContractError);
}

// A cutoff of -inf (k == E) or a NaN must stay inside the histogram's memory.
TEST(Balancing, EndlessAndNanCutoffsAreHarmless) {
  Buffer logits({3, 2}), cutoff({3}), bias({2}), hist({2, 8}, DType::i32);
  logits.normal(3);
  bias.zero();
  cutoff[0] = -std::numeric_limits<float>::infinity();
  cutoff[1] = std::numeric_limits<float>::infinity();
  cutoff[2] = std::numeric_limits<float>::quiet_NaN();
  CpuStream s(kArena);
  quantile_histogram(s, hist.zero(), logits, cutoff, bias);
  for (int64_t e = 0; e < 2; ++e) {
    EXPECT_EQ(hist->i32()[e * 8], 1);
    EXPECT_EQ(hist->i32()[e * 8 + 7], 1);
  }
}

enum class Method { none, quantile, exact, sign };

// Steps of 16384 fresh tokens whose logits favour some experts; returns the largest load / mean - 1 of each step.
std::vector<double> closed_loop(Method method, int steps) {
  const int64_t N = 16384, E = 64, k = 8;
  Batch b(N, E, k, 81);
  b.bias.zero();
  Buffer skew({E}), hist({E, 1000}, DType::i32), m({N, E});
  skew.normal(82);
  std::vector<double> violation;
  for (int step = 0; step < steps; ++step) {
    b.logits.normal(100 + static_cast<uint64_t>(step));
    for (int64_t i = 0; i < N * E; ++i) b.logits[i] += skew[i % E];
    b.route();
    const int32_t* load = b.load->i32();
    violation.push_back(double{1} * *std::max_element(load, load + E) / (N * k / E) - 1);
    CpuStream s(kArena);
    if (method == Method::quantile) {
      quantile_histogram(s, hist.zero(), b.logits, b.cutoff, b.bias);
      quantile_solve(s, b.bias, hist, k, 1.f);
    } else if (method == Method::exact) {
      margins(s, m, b.logits, b.cutoff);
      exact_solve(s, b.bias, m, k, true);
    } else if (method == Method::sign) {
      sign_solve(s, b.bias, b.load, 1e-3f);
    }
  }
  return violation;
}

// From a cold start on a skewed router.  The floor of any bias estimated on one batch and used on the next is about
// 2 sqrt(ln E / q) = 0.09 here (q = 2048 tokens per expert); twice that leaves room for the largest of 64 loads.
TEST(Balancing, ClosedLoopReachesTheNoiseFloor) {
  const double floor = 2 * std::sqrt(std::log(64.0) / 2048);
  const auto none = closed_loop(Method::none, 5), quantile = closed_loop(Method::quantile, 6);
  const auto exact = closed_loop(Method::exact, 6), sign = closed_loop(Method::sign, 5);
  for (double v : none) EXPECT_GT(v, 3.0);
  EXPECT_GT(quantile[0], 3.0) << "the bias acts from the next step on";
  EXPECT_LT(quantile[5], 2 * floor);
  EXPECT_LT(exact[5], 2 * floor);
  EXPECT_NEAR(quantile[5], exact[5], 0.05) << "1000 bins are as good as sorting";
  EXPECT_GT(sign[4], 2.0) << "the sign rule is far slower";
  std::printf("max violation: none %.2f  quantile %.3f %.3f %.3f %.3f %.3f %.3f  exact %.3f  sign %.2f  floor %.3f\n",
              none[4], quantile[0], quantile[1], quantile[2], quantile[3], quantile[4], quantile[5], exact[5], sign[4],
              floor);
}

}  // namespace
}  // namespace kestrel
