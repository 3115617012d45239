#include <omp.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/router/router.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::Buffer;
using test::CpuStream;

constexpr int64_t kArena = int64_t{64} << 20;

// Everything route_forward writes, for one call.
struct Routed {
  Buffer index, weight, score, cutoff, load;
  Routed(const Routing& r, int64_t N)
      : index({N, r.slots}, DType::i32),
        weight({N, r.slots}),
        score({N, r.slots}),
        cutoff({N}),
        load({r.experts}, DType::i32) {
    load.zero();
  }
  void run(const Routing& r, Tensor logits, Tensor bias, Tensor valid = {}) {
    CpuStream s(kArena);
    route_forward(s, r, index, weight, score, cutoff, load, logits, bias, valid);
  }
  int32_t id(int64_t n, int64_t j) const { return index->i32()[n * index->cols() + j]; }
};

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

Routing top_k(int64_t experts, int64_t k, bool renormalize = true, float scaling = 1.f) {
  return {experts, k, k, false, renormalize, scaling};
}

TEST(Router, EqualsAStableSortOfTheBiasedScores) {
  for (auto [E, k] :
       {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {2, 2}, {7, 3}, {64, 8}, {65, 64}, {128, 8}, {130, 1}, {896, 16}}) {
    const int64_t N = 70;  // more than one piece of rows, not a multiple
    Buffer logits({N, E}), bias({E});
    logits.normal(1 + static_cast<uint64_t>(E));
    bias.normal(2, 0.1f);
    // coarse logits and bias: many exact ties
    for (int64_t i = 0; i < N * E; ++i) logits[i] = std::round(logits[i] * 4) / 4;
    for (int64_t i = 0; i < E; ++i) bias[i] = std::round(bias[i] * 8) / 8;
    const Routing r = top_k(E, k);
    Routed got(r, N);
    got.run(r, logits, bias);
    std::vector<int32_t> load(static_cast<size_t>(E));
    for (int64_t n = 0; n < N; ++n) {
      std::vector<float> biased(static_cast<size_t>(E));
      for (int64_t e = 0; e < E; ++e) {
        biased[static_cast<size_t>(e)] = static_cast<float>(sigmoid(logits[n * E + e])) + bias[e];
      }
      std::vector<int32_t> order(static_cast<size_t>(E));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        // equal logits under equal biases tie whatever the rounding of sigmoid; others differ by far more than 1e-6
        return biased[static_cast<size_t>(a)] > biased[static_cast<size_t>(b)] + 1e-6f;
      });
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += sigmoid(logits[n * E + order[static_cast<size_t>(j)]]);
      for (int64_t j = 0; j < k; ++j) {
        const int32_t e = order[static_cast<size_t>(j)];
        ASSERT_EQ(got.id(n, j), e) << "E " << E << " token " << n << " slot " << j;
        ++load[static_cast<size_t>(e)];
        // fp32 sigmoid and a sum of at most 64 terms
        EXPECT_NEAR(got.score[n * k + j], sigmoid(logits[n * E + e]), 1e-6);
        EXPECT_NEAR(got.weight[n * k + j], sigmoid(logits[n * E + e]) / sum, 1e-6);
      }
      if (k == E) {
        EXPECT_EQ(got.cutoff[n], -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(got.cutoff[n], biased[static_cast<size_t>(order[static_cast<size_t>(k)])], 1e-6);
      }
    }
    for (int64_t e = 0; e < E; ++e) EXPECT_EQ(got.load->i32()[e], load[static_cast<size_t>(e)]);
  }
}

TEST(Router, ChoosesAsTheFixtureDoes) {
  const auto f = test::fixture("quantile_balancing");
  const Tensor scores = f.tensor("scores"), index = f.tensor("index"), alpha = f.tensor("alpha");
  const int64_t N = scores.rows(), E = scores.cols(), k = index.cols();
  Buffer logits({N, E});
  for (int64_t i = 0; i < N * E; ++i) {
    const double s = scores.f32()[i];
    logits[i] = static_cast<float>(std::log(s / (1 - s)));
  }
  const Routing r = top_k(E, k);
  Routed got(r, N);
  got.run(r, logits, f.tensor("bias"));
  EXPECT_TRUE(same_bits(got.index, index));
  // the score goes through a rounded logit and back: 1e-6 of values around 0.7
  EXPECT_LE(test::relative_error(got.cutoff, alpha), 1e-6);
}

TEST(Router, TiesGoToTheLowerIndex) {
  Buffer logits({1, 6}), bias({6});
  bias.zero();
  logits.zero();
  logits[3] = -0.f;
  const Routing r = top_k(6, 4);
  Routed got(r, 1);
  got.run(r, logits, bias);
  for (int32_t j = 0; j < 4; ++j) EXPECT_EQ(got.id(0, j), j);
  EXPECT_EQ(got.cutoff[0], 0.5f);
}

// A bias of 34.50 against 34.51 differs in fp32 and not in bf16: the choice proves that nothing rounds it.
TEST(Router, BiasKeepsFp32) {
  Buffer logits({1, 2}), bias({2});
  logits.zero();
  bias[0] = 34.50f;
  bias[1] = 34.51f;
  const Routing r = top_k(2, 1);
  Routed got(r, 1);
  got.run(r, logits, bias);
  EXPECT_EQ(got.id(0, 0), 1);
}

TEST(Router, BiasChoosesButNeverWeighs) {
  for (auto [E, k] : {std::pair<int64_t, int64_t>{4, 2}, {8, 1}, {64, 8}, {128, 8}, {896, 16}}) {
    for (bool renormalize : {true, false}) {
      const Routing r = top_k(E, k, renormalize, 2.5f);
      Buffer logits({9, E}), bias({E});
      logits.normal(static_cast<uint64_t>(E));
      bias.zero();
      bias[0] = 10.f;
      Routed got(r, 9);
      got.run(r, logits, bias);
      for (int64_t n = 0; n < 9; ++n) {
        EXPECT_EQ(got.id(n, 0), 0);
        double sum = 1e-20;
        for (int64_t j = 0; j < k; ++j) sum += sigmoid(logits[n * E + got.id(n, j)]);
        for (int64_t j = 0; j < k; ++j) {
          const double want = 2.5 * sigmoid(logits[n * E + got.id(n, j)]) / (renormalize ? sum : 1.0);
          EXPECT_NEAR(got.weight[n * k + j], want, 3e-6);  // a few fp32 roundings of values up to 2.5
        }
      }
    }
  }
}

TEST(Router, NanSortsLastAndEndlessLogitsAreFine) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  Buffer logits({3, 4}), bias({4});
  bias.zero();
  const float rows[3][4] = {{nan, -50.f, nan, 1.f}, {nan, nan, nan, nan}, {inf, -inf, 0.f, -nan}};
  std::memcpy(logits->data, rows, sizeof rows);
  const Routing r = top_k(4, 3);
  Routed got(r, 3);
  got.run(r, logits, bias);
  const int32_t want[3][3] = {{3, 1, 0}, {0, 1, 2}, {0, 2, 1}};
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t j = 0; j < 3; ++j) EXPECT_EQ(got.id(n, j), want[n][j]) << n << " " << j;
  }
  EXPECT_TRUE(std::isnan(got.weight[0])) << "a chosen NaN must show";
  EXPECT_FLOAT_EQ(got.weight[2 * 3 + 0], 1.f / 1.5f);
  EXPECT_EQ(got.weight[2 * 3 + 2], 0.f);
  Routing t{4, 1, 2, true, true, 1.f};
  Routed fired(t, 3);
  fired.run(t, logits, bias);
  EXPECT_EQ(fired.id(1, 0), -1) << "a threshold never lets a NaN through";
}

TEST(Router, MaskedTokensChangeNothing) {
  const int64_t N = 200, E = 16, k = 3;
  const Routing r = top_k(E, k);
  Buffer logits({N, E}), bias({E}), valid({N}, DType::u8);
  logits.normal(3);
  bias.normal(4, 0.1f);
  Routed whole(r, N), masked(r, N);
  std::vector<int32_t> load(static_cast<size_t>(E));
  for (int64_t n = 0; n < N; ++n) valid->as<uint8_t>()[n] = n % 10 != 7;
  whole.run(r, logits, bias);
  masked.run(r, logits, bias, valid);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t j = 0; j < k; ++j) {
      if (n % 10 == 7) {
        EXPECT_EQ(masked.id(n, j), -1);
        EXPECT_EQ(masked.weight[n * k + j], 0.f);
        EXPECT_EQ(masked.score[n * k + j], 0.f);
      } else {
        EXPECT_EQ(masked.id(n, j), whole.id(n, j));
        EXPECT_EQ(masked.weight[n * k + j], whole.weight[n * k + j]);
        ++load[static_cast<size_t>(whole.id(n, j))];
      }
    }
    EXPECT_EQ(std::isnan(masked.cutoff[n]), n % 10 == 7);
  }
  for (int64_t e = 0; e < E; ++e) EXPECT_EQ(masked.load->i32()[e], load[static_cast<size_t>(e)]);
}

// Loads are integers: many small batches add up exactly (a bf16 sum of this size loses hundreds).
TEST(Router, LoadsAddUpExactly) {
  const Routing r = top_k(2, 1);
  Buffer logits({639, 2}), bias({2});
  logits.zero();
  bias.zero();
  Routed got(r, 639);
  for (int rank = 0; rank < 64; ++rank) got.run(r, logits, bias);
  EXPECT_EQ(got.load->i32()[0], 64 * 639);
  EXPECT_EQ(got.load->i32()[1], 0);
}

TEST(Router, ThresholdFiresAboveZeroUpToTheCap) {
  Buffer logits({3, 5}), bias({5});
  for (int64_t e = 0; e < 5; ++e) bias[e] = -0.5f;
  const float rows[3][5] = {{1, 0, -1, 2, 3}, {-1, -2, 0, -3, -1}, {-1, 0.5f, 0.5f, -1, -1}};
  std::memcpy(logits->data, rows, sizeof rows);
  const Routing r{5, 1, 2, true, true, 1.f};
  Routed got(r, 3);
  CpuStream s(kArena);
  route_forward(s, r, got.index, got.weight, got.score, {}, got.load, logits, bias);
  EXPECT_EQ(got.id(0, 0), 4);
  EXPECT_EQ(got.id(0, 1), 3);   // expert 0 fires too, but the cap is two
  EXPECT_EQ(got.id(1, 0), -1);  // a biased score of exactly zero does not fire
  EXPECT_EQ(got.weight[2], 0.f);
  EXPECT_EQ(got.id(2, 0), 1);
  EXPECT_EQ(got.id(2, 1), 2);
  EXPECT_FLOAT_EQ(got.weight[4], 0.5f);
  const int32_t load[5] = {0, 1, 1, 1, 1};
  for (int64_t e = 0; e < 5; ++e) EXPECT_EQ(got.load->i32()[e], load[e]);
}

// L = sum_nj dw_nj weight_nj in fp64 with the choice held fixed.
double weight_loss(const Routing& r, const std::vector<double>& logits, const Routed& got, const Buffer& dweight) {
  double loss = 0;
  for (int64_t n = 0; n < got.index->rows(); ++n) {
    double sum = 1e-20;
    for (int64_t j = 0; j < r.slots; ++j) {
      if (got.id(n, j) >= 0) sum += sigmoid(logits[static_cast<size_t>(n * r.experts + got.id(n, j))]);
    }
    for (int64_t j = 0; j < r.slots; ++j) {
      if (got.id(n, j) < 0) continue;
      const double s = sigmoid(logits[static_cast<size_t>(n * r.experts + got.id(n, j))]);
      loss += dweight[n * r.slots + j] * s * r.scaling / (r.renormalize ? sum : 1);
    }
  }
  return loss;
}

TEST(Router, BackwardEqualsFiniteDifferences) {
  for (const Routing& r : {top_k(7, 3, true, 2.5f), top_k(7, 3, false, 2.5f), top_k(5, 5),
                           Routing{6, 2, 4, true, true, 1.f}, Routing{6, 2, 3, true, false, 1.f}}) {
    const int64_t N = 5, E = r.experts;
    Buffer logits({N, E}), bias({E}), dweight({N, r.slots}), dlogits({N, E});
    logits.normal(5, 2.f);
    bias.normal(6, 0.1f, r.threshold ? -0.5f : 0.f);
    Routed got(r, N);
    got.run(r, logits, bias);
    dweight.normal(7);
    for (int64_t i = 0; i < N * r.slots; ++i) {
      if (got.index->i32()[i] < 0) dweight[i] = std::numeric_limits<float>::quiet_NaN();  // unused slots are not read
    }
    CpuStream s(kArena);
    route_backward(s, r, dlogits, dweight, got.index, got.score);
    std::vector<double> z(logits.f(), logits.f() + N * E);
    for (int64_t i = 0; i < N * E; ++i) {
      const double h = 1e-5;
      auto moved = z;
      moved[static_cast<size_t>(i)] += h;
      const double up = weight_loss(r, moved, got, dweight);
      moved[static_cast<size_t>(i)] -= 2 * h;
      const double down = weight_loss(r, moved, got, dweight);
      // central differences in fp64 err by 1e-9; the rest is fp32 arithmetic on values of order 1
      EXPECT_NEAR(dlogits[i], (up - down) / (2 * h), 2e-6) << "E " << E << " element " << i;
    }
  }
}

// Renormalised with one expert per token every weight is 1: the router gets no gradient.  Without, it does.
TEST(Router, OneExpertRenormalisedCannotLearn) {
  for (bool renormalize : {true, false}) {
    const Routing r = top_k(4, 1, renormalize);
    Buffer logits({6, 4}), bias({4}), dweight({6, 1}), dlogits({6, 4});
    logits.normal(8);
    bias.zero();
    dweight.normal(9);
    Routed got(r, 6);
    got.run(r, logits, bias);
    CpuStream s(kArena);
    route_backward(s, r, dlogits, dweight, got.index, got.score);
    double norm = 0;
    for (int64_t i = 0; i < 24; ++i) norm += std::fabs(dlogits[i]);
    if (renormalize) {
      EXPECT_LE(norm, 1e-6);  // dw - dw s/s cancels up to rounding
    } else {
      EXPECT_GE(norm, 1e-1);
    }
  }
}

// Scores that all underflow: weights and gradients are zero, not NaN.
TEST(Router, UnderflownScoresStayFinite) {
  const Routing r = top_k(3, 2);
  Buffer logits({1, 3}), bias({3}), dweight({1, 2}), dlogits({1, 3});
  for (int64_t e = 0; e < 3; ++e) logits[e] = -500.f;
  bias.zero();
  Routed got(r, 1);
  got.run(r, logits, bias);
  dweight.normal(10);
  CpuStream s(kArena);
  route_backward(s, r, dlogits, dweight, got.index, got.score);
  for (int64_t j = 0; j < 2; ++j) EXPECT_EQ(got.weight[j], 0.f);
  for (int64_t e = 0; e < 3; ++e) EXPECT_EQ(dlogits[e], 0.f);
}

double aux_loss_of(const std::vector<double>& z, int64_t N, int64_t E, int64_t k, const int32_t* load,
                   const uint8_t* valid) {
  double loss = 0, counted = 0;
  for (int64_t n = 0; n < N; ++n) counted += valid[n];
  for (int64_t n = 0; n < N; ++n) {
    if (!valid[n]) continue;
    double sum = 0, dot = 0;
    for (int64_t e = 0; e < E; ++e) {
      const double s = sigmoid(z[static_cast<size_t>(n * E + e)]);
      sum += s;
      dot += s * load[e] / (counted * static_cast<double>(k));
    }
    loss += dot / sum / counted;
  }
  return loss * static_cast<double>(E);
}

TEST(Router, AuxLossAndItsGradient) {
  const int64_t N = 130, E = 67, k = 2;
  const float coefficient = 0.3f, scale = 2.f;
  Buffer logits({N, E}), dlogits({N, E}), load({E}, DType::i32), loss({1}), valid({N}, DType::u8);
  logits.normal(11);
  dlogits.zero();
  loss[0] = 1.f;
  int64_t counted = 0;
  for (int64_t n = 0; n < N; ++n) counted += valid->as<uint8_t>()[n] = n % 5 != 3;
  for (int64_t e = 0; e < E; ++e) load->i32()[e] = static_cast<int32_t>(e * 7 % 11);
  CpuStream s(kArena);
  aux_loss(s, coefficient, scale, loss, dlogits, logits, load, k, valid);
  std::vector<double> z(logits.f(), logits.f() + N * E);
  const auto value = [&](const std::vector<double>& x) {
    return coefficient * aux_loss_of(x, N, E, k, load->i32(), valid->as<uint8_t>());
  };
  EXPECT_NEAR(loss[0], 1 + value(z), 2e-6);  // fp32 sums
  for (int64_t i = 0; i < N * E; i += 41) {
    const double h = 1e-4;
    auto moved = z;
    moved[static_cast<size_t>(i)] += h;
    const double up = value(moved);
    moved[static_cast<size_t>(i)] -= 2 * h;
    const double want = scale * (up - value(moved)) / (2 * h);
    // gradients are of order 1e-5 here; 1e-9 is fp32 rounding and the difference's own error
    EXPECT_NEAR(dlogits[i], want, 1e-9) << "element " << i;
  }
}

TEST(Router, AuxLossOfPerfectBalanceIsItsCoefficient) {
  const int64_t N = 8, E = 4, k = 2;
  Buffer logits({N, E}), dlogits({N, E}), load({E}, DType::i32), loss({1});
  logits.zero();
  dlogits.zero();
  loss.zero();
  for (int64_t e = 0; e < E; ++e) load->i32()[e] = 4;  // N k / E
  CpuStream s(kArena);
  aux_loss(s, 0.25f, 1.f, loss, dlogits, logits, load, k);
  EXPECT_FLOAT_EQ(loss[0], 0.25f);
  for (int64_t i = 0; i < N * E; ++i) EXPECT_NEAR(dlogits[i], 0.f, 1e-9);
}

TEST(Router, SameBitsForEveryThreadCountAndRun) {
  const int64_t N = 500, E = 70, k = 5;
  const Routing r = top_k(E, k);
  Buffer logits({N, E}), bias({E}), dweight({N, k});
  logits.normal(12);
  bias.normal(13, 0.1f);
  dweight.normal(14);
  Routed first(r, N);
  Buffer dfirst({N, E}), afirst({1});
  const int threads = omp_get_max_threads();
  for (int run = 0; run < 20; ++run) {
    omp_set_num_threads(run % 2 == 0 ? 1 : 2);
    Routed got(r, N);
    got.run(r, logits, bias);
    Buffer dlogits({N, E}), loss({1});
    loss.zero();
    CpuStream s(kArena);
    route_backward(s, r, dlogits, dweight, got.index, got.score);
    aux_loss(s, 0.1f, 1.f, loss, dlogits, logits, got.load, k);
    if (run == 0) {
      first.run(r, logits, bias);
      dfirst.copy(dlogits);
      afirst.copy(loss);
    }
    EXPECT_TRUE(same_bits(got.index, first.index) && same_bits(got.weight, first.weight) &&
                same_bits(got.cutoff, first.cutoff) && same_bits(got.load, first.load));
    EXPECT_TRUE(same_bits(dlogits, dfirst) && same_bits(loss, afirst));
  }
  omp_set_num_threads(threads);
}

TEST(Router, PlanningCountsScratchAndTouchesNothing) {
  const Routing r = top_k(64, 8);
  Arena plan = Arena::planner(Device::cpu);
  Stream s(plan);
  const auto fake = [&](std::initializer_list<int64_t> shape, DType t = DType::f32) {
    return plan.keep(shape, t, "test");
  };
  const int64_t before = plan.peak();
  route_forward(s, r, fake({1000, 8}, DType::i32), fake({1000, 8}), fake({1000, 8}), fake({1000}),
                fake({64}, DType::i32), fake({1000, 64}), fake({64}));
  EXPECT_GT(plan.peak(), before);
  EXPECT_EQ(plan.temp_mark(), Arena::planner(Device::cpu).temp_mark()) << "scratch is given back";
}

TEST(Router, RefusesWrongShapes) {
  Buffer logits({2, 4}), bias({4});
  Routing r = top_k(4, 2);
  Routed got(r, 2);
  CpuStream s(kArena);
  r.k = 5;
  EXPECT_THROW(got.run(r, logits, bias), ContractError);
  r = top_k(4, 2);
  r.slots = 3;
  EXPECT_THROW(got.run(r, logits, bias), ContractError);
  Buffer half({2}, DType::bf16);
  r = top_k(4, 2);
  EXPECT_THROW(got.run(r, logits, Tensor(half->data, {4}, DType::bf16)), ContractError) << "the bias is fp32";
}

TEST(Router, NoTokens) {
  const Routing r = top_k(4, 2);
  Buffer logits({0, 4}), bias({4}), dweight({0, 2}), dlogits({0, 4}), loss({1});
  bias.zero();
  loss.zero();
  Routed got(r, 0);
  got.run(r, logits, bias);
  CpuStream s(kArena);
  route_backward(s, r, dlogits, dweight, got.index, got.score);
  aux_loss(s, 1.f, 1.f, loss, dlogits, logits, got.load, 2);
  for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(got.load->i32()[e], 0);
  EXPECT_EQ(loss[0], 0.f);
}

}  // namespace
}  // namespace kestrel
