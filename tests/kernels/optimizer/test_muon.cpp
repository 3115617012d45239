#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

double rms(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return std::sqrt(sum / static_cast<double>(n));
}

// What the iteration does to one singular value.
double ns_of(double x, int steps) {
  for (int i = 0; i < steps; ++i) x = 3.4445 * x - 4.7750 * x * x * x + 2.0315 * x * x * x * x * x;
  return x;
}

// n orthonormal rows of `dim`, by Gram-Schmidt in fp64.
std::vector<std::vector<double>> orthonormal(int64_t n, int64_t dim, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> d;
  std::vector<std::vector<double>> rows;
  for (int64_t i = 0; i < n; ++i) {
    std::vector<double> v(static_cast<size_t>(dim));
    for (double& x : v) x = d(rng);
    for (int again = 0; again < 2; ++again) {
      for (const auto& u : rows) {
        double dot = 0;
        for (size_t k = 0; k < v.size(); ++k) dot += u[k] * v[k];
        for (size_t k = 0; k < v.size(); ++k) v[k] -= dot * u[k];
      }
    }
    double norm = 0;
    for (const double x : v) norm += x * x;
    for (double& x : v) x /= std::sqrt(norm);
    rows.push_back(v);
  }
  return rows;
}

// The update of one Muon step from zero weights, zero momentum, without decay: -lr scale NS(..) with lr = 1.
void update(Stream& s, Buffer& p, const Tensor& g, Muon h, float grad_scale = 1.f) {
  Buffer m({g.dim(0), g.dim(1), g.dim(2)});
  p.zero();
  m.zero();
  h.lr = 1.f;
  h.weight_decay = 0.f;
  muon_step(s, h, p, g, m, 0, grad_scale);
}

}  // namespace

TEST(NewtonSchulz, Fixture) {
  const auto f = fixture("newton_schulz");
  CpuStream s;
  // 1e-4: the first steps multiply a small singular value, and the fp32 rounding beside it, by 3.4445 each.
  constexpr double kTolerance = 1e-4;
  Buffer x({1, 48, 80}), heads({3, 16, 80}), tall({1, 80, 48});
  x.copy(f.tensor("g"));
  newton_schulz(s, x, 5);
  EXPECT_LE(relative_error(x, f.tensor("wide")), kTolerance);
  heads.copy(f.tensor("g"));
  newton_schulz(s, heads, 5);
  EXPECT_LE(relative_error((*heads).view({48, 80}), f.tensor("per_head_16")), kTolerance);
  for (int64_t i = 0; i < 48; ++i)
    for (int64_t j = 0; j < 80; ++j) tall[j * 48 + i] = f.tensor("g").f32()[i * 80 + j];
  newton_schulz(s, tall, 5);
  EXPECT_LE(relative_error(tall, f.tensor("tall")), kTolerance);
  for (int64_t i = 0; i < 48 * 80; ++i) x[i] = 1e-10f * f.tensor("g").f32()[i];
  newton_schulz(s, x, 5);
  EXPECT_LE(relative_error(x, f.tensor("tiny")), kTolerance);
}

TEST(NewtonSchulz, TwoByThree) {
  CpuStream s;
  const double one[] = {-.08908463, .12522971, .33954405, .36423403, .37944279, .39465156};
  const double five[] = {-.56829009, .05774194, .68377398, .56335468, .40561282, .24787096};
  for (const int steps : {1, 5}) {
    Buffer x({1, 2, 3});
    for (int i = 0; i < 6; ++i) x[i] = static_cast<float>(i + 1);
    newton_schulz(s, x, steps);
    // 1e-5: fp32, and the small singular value (0.08 of the norm) grows by up to 3.4445 a step.
    for (int i = 0; i < 6; ++i) EXPECT_NEAR(x[i], steps == 1 ? one[i] : five[i], 1e-5);
  }
  Buffer x({1, 2, 3});
  for (int i = 0; i < 6; ++i) x[i] = static_cast<float>(i + 1);
  newton_schulz(s, x, 0);
  EXPECT_NEAR(x[5], 6 / 9.53939201, 1e-7);  // no step: only normalised
}

TEST(NewtonSchulz, TransposeIsBitwise) {
  CpuStream s;
  for (const auto& [rows, cols] : {std::pair{1, 64}, std::pair{13, 37}, std::pair{130, 150}}) {
    Buffer wide({1, rows, cols}), tall({1, cols, rows});
    wide.normal(3);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) tall[j * rows + i] = wide[i * cols + j];
    newton_schulz(s, wide, 5);
    newton_schulz(s, tall, 5);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) ASSERT_EQ(tall[j * rows + i], wide[i * cols + j]);
  }
}

TEST(NewtonSchulz, OneRow) {
  CpuStream s;
  Buffer x({1, 1, 64});
  x.normal(3);
  newton_schulz(s, x, 5);
  EXPECT_NEAR(rms(x.f(), 64) * 8.0, .69643641, 1e-5);  // its only singular value, 1 before; fp32
}

TEST(NewtonSchulz, EverySingularValueFollowsTheQuintic) {
  CpuStream s;
  const auto u = orthonormal(12, 12, 1), v = orthonormal(12, 40, 2);
  // Singular values from 0.01 to 0.3 and one that makes the norm 1, so that dividing by it changes nothing.
  std::vector<double> sigma;
  double left = 1;
  for (int i = 0; i < 11; ++i) {
    sigma.push_back(0.01 * std::pow(30.0, i / 10.0));
    left -= sigma.back() * sigma.back();
  }
  sigma.push_back(std::sqrt(left));
  Buffer x({1, 12, 40});
  for (size_t i = 0; i < 12; ++i) {
    for (size_t j = 0; j < 40; ++j) {
      double sum = 0;
      for (size_t k = 0; k < 12; ++k) sum += u[k][i] * sigma[k] * v[k][j];
      x[static_cast<int64_t>(i * 40 + j)] = static_cast<float>(sum);
    }
  }
  newton_schulz(s, x, 5);
  for (size_t k = 0; k < 12; ++k) {
    double got = 0;
    for (size_t i = 0; i < 12; ++i)
      for (size_t j = 0; j < 40; ++j) got += u[k][i] * x[static_cast<int64_t>(i * 40 + j)] * v[k][j];
    EXPECT_NEAR(got, ns_of(sigma[k], 5), 1e-4) << sigma[k];  // fp32 rounding grown by up to 3.4445^5
    EXPECT_GT(got, .68);
    EXPECT_LT(got, 1.135);
  }
}

TEST(NewtonSchulz, ZeroStaysZeroAndScaleDoesNotMatter) {
  CpuStream s;
  Buffer x({2, 9, 21}), y({2, 9, 21});
  x.normal(1);
  for (int64_t i = 0; i < x->numel(); ++i) y[i] = 1e-10f * x[i];
  newton_schulz(s, x, 5);
  newton_schulz(s, y, 5);
  EXPECT_LE(relative_error(y, x), 1e-5);  // 1e-10f x rounds each element: 6e-8, grown by the iteration
  x.zero();
  newton_schulz(s, x, 5);
  for (int64_t i = 0; i < x->numel(); ++i) ASSERT_EQ(x[i], 0.f);
  Buffer none({0, 3, 4});
  newton_schulz(s, none, 5);  // nothing to do is fine
}

TEST(NewtonSchulz, BatchedEqualsALoopAndFusedMatricesDiffer) {
  CpuStream s;
  Buffer batch({70, 6, 10}), fused({35, 12, 10}), one({1, 6, 10});  // 70: more than one matrix to a slot
  batch.normal(1);
  fused.copy((*batch).view({35, 12, 10}));
  const std::vector<float> start(batch.f(), batch.f() + 70 * 60);
  newton_schulz(s, batch, 5);
  for (int64_t i = 0; i < 70; ++i) {
    std::memcpy(one.f(), start.data() + i * 60, 60 * sizeof(float));
    newton_schulz(s, one, 5);
    ASSERT_EQ(std::memcmp(one.f(), batch.f() + i * 60, 60 * sizeof(float)), 0) << i;
  }
  newton_schulz(s, fused, 5);
  EXPECT_GT(relative_error(fused, (*batch).view({35, 12, 10})), 0.1);  // gate and up must be cut apart first
}

TEST(NewtonSchulz, BitsDoNotDependOnThreads) {
  CpuStream s;
  const int before = omp_get_max_threads();
  for (const auto& [n, rows, cols] : {std::tuple{5, 7, 33}, std::tuple{2, 130, 140}, std::tuple{1, 150, 129}}) {
    Buffer start({n, rows, cols}), one({n, rows, cols}), two({n, rows, cols});
    start.normal(4);
    for (const int threads : {1, 2}) {
      omp_set_num_threads(threads);
      Buffer& x = threads == 1 ? one : two;
      x.copy(start);
      newton_schulz(s, x, 5);
    }
    EXPECT_EQ(std::memcmp(one.f(), two.f(), static_cast<size_t>(one->bytes())), 0);
  }
  omp_set_num_threads(before);
}

TEST(Muon, Fixture) {
  const auto f = fixture("optimizer_steps");
  CpuStream s;
  Buffer p({3, 4, 20}), m({3, 4, 20});
  p.copy(f.tensor("p"));
  m.zero();
  for (int64_t i = 0; i < 4; ++i) muon_step(s, {.lr = 1e-2f}, p, f.tensor("g")[i].view({3, 4, 20}), m, 0, 1.f);
  EXPECT_LE(relative_error((*p).view({12, 20}), f.tensor("muon_blocks_of_4")), 1e-5);  // fp32, step of 1e-2
  EXPECT_LE(relative_error((*m).view({12, 20}), f.tensor("muon_momentum")), 1e-6);     // four fp32 additions
}

TEST(Muon, OneStep) {
  CpuStream s;
  Buffer p({1, 2, 3}), g({1, 2, 3}), m({1, 2, 3});
  for (int i = 0; i < 6; ++i) {
    p[i] = 0.1f;
    g[i] = static_cast<float>(i + 1);
  }
  m.zero();
  muon_step(s, {.lr = 0.02f, .weight_decay = 0.1f}, p, g, m, 0, 1.f);
  const double expected[] = {.10373723, .09939995, .09506267, .09589696, .09698983, .09808270};
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(p[i], expected[i], 1e-7);  // fp32: the NS error times lr 0.35
}

TEST(Muon, GradientScaleVanishesInTheFirstStep) {
  CpuStream s;
  Buffer g({2, 5, 11}), p({2, 5, 11}), q({2, 5, 11});
  g.normal(1);
  update(s, p, g, {.lr = 1.f});
  update(s, q, g, {.lr = 1.f}, 1e-8f);
  EXPECT_LE(relative_error(q, p), 1e-5);  // 1e-8f g rounds each element, grown by the iteration
}

TEST(Muon, HeadsAreOrthogonalisedOnTheirOwn) {
  CpuStream s;
  constexpr int64_t H = 8, D = 32, in = 128;
  Buffer g({H, D, in}), heads({H, D, in}), whole({1, H * D, in}), one({1, D, in});
  g.normal(1);
  for (int64_t h = 0; h < H; ++h)
    for (int64_t i = 0; i < D * in; ++i) g[h * D * in + i] *= std::exp2(static_cast<float>(-h));
  update(s, heads, g, {.lr = 1.f});
  update(s, whole, (*g).view({1, H * D, in}), {.lr = 1.f});
  const double first = rms(heads.f(), D * in), first_whole = rms(whole.f(), D * in);
  for (int64_t h = 0; h < H; ++h) {
    update(s, one, (*g).slice(h, 1), {.lr = 1.f});
    EXPECT_EQ(std::memcmp(one.f(), heads.f() + h * D * in, D * in * sizeof(float)), 0);
    EXPECT_NEAR(rms(heads.f() + h * D * in, D * in) / first, 1.0, 0.04);  // the spread of a random head's spectrum
  }
  EXPECT_LT(rms(whole.f() + 7 * D * in, D * in) / first_whole, 0.6);  // a weak head moves less in a whole matrix
}

TEST(Muon, UpdateHasTheSizeOfAdams) {
  CpuStream s;
  // RMS / 0.2 of Gaussian blocks; a scale taken from the whole matrix instead of the block would be off by sqrt(heads).
  const auto size = [&](int64_t rows, int64_t cols) {
    Buffer g({1, rows, cols}), p({1, rows, cols});
    g.normal(7);
    update(s, p, g, {.lr = 1.f});
    return rms(p.f(), rows * cols) / 0.2;
  };
  EXPECT_NEAR(size(128, 256), .877, .012);  // 0.01 and a little: the spread between seeds
  EXPECT_NEAR(size(128, 128), .886, .012);
  EXPECT_NEAR(size(64, 256), .854, .012);
}

TEST(Muon, MomentumIsExactAndTheGradientUnchanged) {
  CpuStream s;
  Buffer p({1, 3, 5}), g({1, 3, 5}), m({1, 3, 5});
  p.zero();
  for (int i = 0; i < 15; ++i) {
    g[i] = static_cast<float>(i - 7);
    m[i] = static_cast<float>(3 * i);
  }
  muon_step(s, {.lr = 0.1f, .momentum = 0.5f}, p, g, m, 0, 0.25f);
  for (int i = 0; i < 15; ++i) {
    EXPECT_EQ(m[i], 0.5f * static_cast<float>(3 * i) + 0.25f * static_cast<float>(i - 7));  // exact in binary
    EXPECT_EQ(g[i], static_cast<float>(i - 7));
  }
  // Nesterov orthogonalises g + mu m, the plain form m.
  Buffer u({1, 3, 5}), plain({1, 3, 5}), nesterov({1, 3, 5}), m2({1, 3, 5});
  for (const bool look_ahead : {false, true}) {
    Buffer& q = look_ahead ? nesterov : plain;
    q.zero();
    m2.copy(m);
    muon_step(s, {.lr = 1.f, .momentum = 0.5f, .weight_decay = 0.f, .nesterov = look_ahead}, q, g, m2, 0, 1.f);
    for (int i = 0; i < 15; ++i) u[i] = look_ahead ? g[i] + 0.5f * m2[i] : m2[i];
    newton_schulz(s, u, 5);
    const float scale = 0.2f * std::sqrt(5.f);
    for (int i = 0; i < 15; ++i) EXPECT_NEAR(q[i], -scale * u[i], 1e-7);  // one rounding of numbers below one
  }
}

TEST(Muon, InterleavedBlocks) {
  CpuStream s;
  constexpr int64_t H = 3, nope = 4, v = 6, c = 10, stride = (nope + v) * c;  // kv_b: K_0 V_0 K_1 V_1 ...
  Buffer w({H * (nope + v), c}), g({H * (nope + v), c}), m({H * (nope + v), c});
  w.normal(1);
  g.normal(2);
  m.normal(3);
  const std::vector<float> w0(w.f(), w.f() + H * stride);
  Buffer p2({H, nope, c}), g2({H, nope, c}), m2({H, nope, c});
  for (int64_t h = 0; h < H; ++h) {
    std::memcpy(p2.f() + h * nope * c, w.f() + h * stride, nope * c * sizeof(float));
    std::memcpy(g2.f() + h * nope * c, g.f() + h * stride, nope * c * sizeof(float));
    std::memcpy(m2.f() + h * nope * c, m.f() + h * stride, nope * c * sizeof(float));
  }
  const auto blocks = [](const Buffer& x, int64_t first, int64_t rows) {
    return Tensor::of(x.f() + first * c, {H, rows, c});
  };
  muon_step(s, {.lr = 0.1f}, blocks(w, 0, nope), blocks(g, 0, nope), blocks(m, 0, nope), stride, 1.f);
  muon_step(s, {.lr = 0.1f}, p2, g2, m2, 0, 1.f);
  for (int64_t h = 0; h < H; ++h) {
    EXPECT_EQ(std::memcmp(w.f() + h * stride, p2.f() + h * nope * c, nope * c * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(m.f() + h * stride, m2.f() + h * nope * c, nope * c * sizeof(float)), 0);
    const size_t v_rows = static_cast<size_t>(h * stride + nope * c);
    EXPECT_EQ(std::memcmp(w.f() + v_rows, w0.data() + v_rows, v * c * sizeof(float)), 0);  // V is not K's business
  }
  muon_step(s, {.lr = 0.1f}, blocks(w, nope, v), blocks(g, nope, v), blocks(m, nope, v), stride, 1.f);
  for (int64_t h = 0; h < H; ++h) {
    EXPECT_NE(w[h * stride + nope * c], w0[static_cast<size_t>(h * stride + nope * c)]);
    EXPECT_EQ(std::memcmp(w.f() + h * stride, p2.f() + h * nope * c, nope * c * sizeof(float)), 0);
  }
}

TEST(Muon, RateZeroLeavesBitsAndZeroGradientOnlyDecays) {
  CpuStream s;
  Buffer p({2, 7, 3}), g({2, 7, 3}), m({2, 7, 3});
  p.normal(1);
  g.normal(2);
  m.zero();
  const std::vector<float> before(p.f(), p.f() + 42);
  muon_step(s, {.lr = 0.f}, p, g, m, 0, 1.f);
  EXPECT_EQ(std::memcmp(p.f(), before.data(), 42 * sizeof(float)), 0);
  g.zero();
  m.zero();
  muon_step(s, {.lr = 0.5f, .weight_decay = 0.5f}, p, g, m, 0, 1.f);                     // an expert that saw no token
  for (int i = 0; i < 42; ++i) EXPECT_EQ(p[i], 0.75f * before[static_cast<size_t>(i)]);  // exact in binary
}

TEST(Muon, PlanningCountsItsScratch) {
  Arena plan = Arena::planner(Device::cpu);
  Stream s(plan);
  const Tensor p = s.temp({4, 30, 20});
  muon_step(s, {.lr = 0.1f}, p, p, p, 0, 1.f);
  newton_schulz(s, p, 5);
  CpuStream real(plan.peak());
  const Tensor q = real.arena().temp({4, 30, 20}, DType::f32);
  std::memset(q.data, 0, static_cast<size_t>(q.bytes()));
  newton_schulz(real, q, 5);  // fits in what was planned
  EXPECT_EQ(real.arena().peak(), plan.peak());
  EXPECT_THROW(muon_step(real, {.lr = 0.1f}, q, q, q, 10, 1.f), ContractError);  // blocks that overlap
}
