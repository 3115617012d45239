// The optimizer on the GPU against the CPU.
#include <limits>
#include <random>

#include "gpu/support.h"
#include "kernels/optimizer/optimizer.h"

namespace kestrel::test {
namespace {

// The elements of a device buffer have the bits of a host tensor's.
void expect_bits(const char* name, const DeviceBuffer& got, const Tensor& want) {
  const std::vector<char> g = got.raw();
  const int64_t size = size_of(want.dtype), n = want.numel() * size;
  ASSERT_EQ(static_cast<int64_t>(g.size()), n) << name;
  const char* w = static_cast<const char*>(want.data);
  for (int64_t i = 0; i < n; ++i) {
    if (g[static_cast<size_t>(i)] == w[i]) continue;
    const int64_t e = i / size;
    ADD_FAILURE() << name << ": first difference in element [" << e / want.cols() << "," << e % want.cols() << "] of "
                  << want.describe() << ", byte " << i % size << ": "
                  << int{static_cast<uint8_t>(g[static_cast<size_t>(i)])} << " for " << int{static_cast<uint8_t>(w[i])};
    return;
  }
}

double value_of(const DeviceBuffer& f64) {
  double x = 0;
  std::memcpy(&x, f64.raw().data(), sizeof x);
  return x;
}

Tensor device_view(const DeviceBuffer& flat, int64_t first, std::initializer_list<int64_t> shape) {
  return Tensor::of(flat->f32() + first, shape, Device::cuda);
}

// ---------------------------------------------------------------- AdamW

TEST(GpuAdamW, ThreeSteps) {
  CudaStream cuda;
  CpuStream cpu;
  // One element, ragged, whole packets, many blocks; `left` moves the tensors off 16 bytes.
  for (const auto& [n, left] :
       {std::pair<int64_t, int64_t>{1, 0}, {7, 0}, {1000, 1}, {4100, 0}, {300001, 3}, {1 << 20, 0}}) {
    SCOPED_TRACE(text(n, " elements, ", left, " before them"));
    Buffer p({1, n}), g({1, n}), m({1, n}), v({1, n});
    p.normal(1);
    m.zero();
    v.zero();
    DeviceBuffer xp(p, DType::f32, left), xm(m, DType::f32, left), xv(v, DType::f32, left),
        xg({1, n}, DType::f32, left);
    for (int64_t t = 1; t <= 3; ++t) {
      const AdamW h{.lr = 1e-2f, .t = t};
      g.normal(static_cast<uint64_t>(10 + t), 3.f);
      xg.upload(g);
      adamw_step(cpu, h, p, g, m, v, 0.3f);
      cuda.run([&](Stream& s) { adamw_step(s, h, xp, xg, xm, xv, 0.3f); });
      expect_bits("g", xg, g);
    }
    // A handful of fp32 roundings a step, more or fewer of them fused; near cancellations in m of 2^-24 of its terms.
    expect_close("p", xp, p, 1e-6);
    expect_close("m", xm, m, 1e-6);
    expect_close("v", xv, v, 1e-6);
  }
}

TEST(GpuAdamW, RateZeroLeavesBits) {
  CudaStream cuda;
  Buffer p({1, 999}), g({1, 999}), zero({1, 999});
  p.normal(1);
  g.normal(2);
  zero.zero();
  DeviceBuffer xp(p, DType::f32), xg(g, DType::f32), xm(zero, DType::f32), xv(zero, DType::f32);
  cuda.run([&](Stream& s) { adamw_step(s, {.lr = 0.f}, xp, xg, xm, xv, 1.f); });
  expect_bits("p", xp, p);
}

// ---------------------------------------------------------------- sum of squares

TEST(GpuSumOfSquares, ManyTensorsOfAllSizesAndAlignments) {
  CudaStream cuda;
  CpuStream cpu;
  constexpr int64_t kAll = 3'000'000;
  Buffer flat({1, kAll});
  flat.normal(1, 1e-3f);
  for (int64_t i = 0; i < kAll; i += 1001) flat[i] *= 1e20f;  // their squares leave fp32
  DeviceBuffer xflat(flat, DType::f32);
  std::vector<Tensor> host, device;
  std::mt19937_64 rng(2);
  // More tensors than fit into three launches: none, one element, ragged, several pieces; column blocks of matrices
  // with and without room for packets.
  for (int i = 0; i < 200; ++i) {
    const int64_t n = i % 7 == 0 ? i % 2 : static_cast<int64_t>(rng() % 40000);
    const int64_t first = static_cast<int64_t>(rng() % 1000000) * (i % 3 == 0 ? 4 : 1) % (kAll - 40000);
    host.push_back(Tensor::of(flat.f() + first, {n}));
    device.push_back(device_view(xflat, first, {n}));
  }
  host.push_back(Tensor::of(flat.f() + 1, {kAll - 1}));
  device.push_back(device_view(xflat, 1, {kAll - 1}));
  for (const auto& [rows, ld, column, cols] :
       {std::tuple{100, 128, 64, 64}, std::tuple{301, 77, 5, 13}, std::tuple{9, 4096, 4, 4000}}) {
    host.push_back(Tensor::of(flat.f(), {rows, ld}).columns(column, cols));
    device.push_back(device_view(xflat, 0, {rows, ld}).columns(column, cols));
  }
  Buffer out({1}, DType::f64);
  out->as<double>()[0] = 3.0;
  DeviceBuffer one({1}, DType::f64), two({1}, DType::f64);
  one.upload(out);
  two.upload(out);
  sum_of_squares(cpu, out, host);
  cuda.run([&](Stream& s) { sum_of_squares(s, one, device); });
  cuda.run([&](Stream& s) { sum_of_squares(s, two, device); });
  const double want = out->as<double>()[0];
  EXPECT_LE(std::fabs(value_of(one) / want - 1), 1e-12) << value_of(one) << " for " << want;  // fp64, another order
  expect_same_bits("the second run", one, two);
}

TEST(GpuSumOfSquares, AlignmentDoesNotMatterAndNothingIsNothing) {
  CudaStream cuda;
  constexpr int64_t n = 50001;
  Buffer x({1, n}), start({1}, DType::f64);
  x.normal(3);
  start->as<double>()[0] = 0;
  DeviceBuffer aligned(x, DType::f32), moved(x, DType::f32, 1), one({1}, DType::f64), two({1}, DType::f64);
  one.upload(start);
  two.upload(start);
  cuda.run([&](Stream& s) { sum_of_squares(s, one, {aligned}); });
  cuda.run([&](Stream& s) { sum_of_squares(s, two, {moved}); });
  expect_same_bits("off 16 bytes", one, two);
  cuda.run([&](Stream& s) { sum_of_squares(s, one, {}); });
  cuda.run([&](Stream& s) { sum_of_squares(s, one, {device_view(aligned, 0, {0, 5})}); });
  expect_same_bits("no elements", one, two);
}

TEST(GpuSumOfSquares, ShowsEveryNumberThatIsNotFinite) {
  CudaStream cuda;
  constexpr int64_t n = 40000;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const int64_t at : {int64_t{0}, int64_t{16383}, int64_t{16384}, n - 1}) {
      Buffer x({1, n}), start({1}, DType::f64);
      x.normal(3);
      x[at] = bad;
      start->as<double>()[0] = 0;
      DeviceBuffer xx(x, DType::f32), out({1}, DType::f64);
      out.upload(start);
      cuda.run([&](Stream& s) { sum_of_squares(s, out, {xx}); });
      EXPECT_FALSE(std::isfinite(value_of(out))) << bad << " at " << at;
    }
  }
}

// ---------------------------------------------------------------- Newton-Schulz and Muon

struct Shape {
  int64_t n, rows, cols;
};
// One row, one column, primes, square, tall and wide, several pieces of a matrix, sizes of a head.
constexpr Shape kShapes[] = {{1, 1, 64},   {3, 64, 1},    {3, 7, 33},    {2, 37, 13},   {5, 16, 16},
                             {2, 64, 128}, {2, 130, 150}, {1, 150, 130}, {3, 128, 512}, {2, 512, 128}};
std::string name(const Shape& c) {
  return text(c.n, " x ", c.rows, " x ", c.cols);
}

// BF16 iterations against fp32 ones.  x, A, B and the result are rounded to 8 bits in each of the five steps, 1.1e-3 in
// the mean square each; a small singular value's share grows by 3.4445 a step.  In a model of the iteration with these
// roundings the results of Gaussian matrices differ by 1.1e-2 (sides of 128 and more) to 2.8e-2 (sides of 2 to 16).
constexpr double kBf16Bound = 4e-2;
// fp32 against fp32: 6e-8 grown by up to 3.4445^5 = 485 in the smallest singular directions.
constexpr double kFp32Bound = 1e-4;

TEST(GpuNewtonSchulz, Bf16) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Shape& c : kShapes) {
    SCOPED_TRACE(name(c));
    Buffer x({c.n, c.rows, c.cols});
    x.normal(1, 1e-10f);                                         // as small as a clipped gradient
    for (int64_t i = 0; i < c.rows * c.cols; ++i) x[i] *= 1e8f;  // every matrix has its own norm
    const Tensor flat = x->view({c.n, c.rows * c.cols});
    DeviceBuffer one(flat, DType::f32), two(flat, DType::f32), still(flat, DType::f32);
    const std::vector<float> before(x.f(), x.f() + x->numel());
    newton_schulz(cpu, x, 5);
    cuda.run([&](Stream& s) { newton_schulz(s, one->view({c.n, c.rows, c.cols}), 5); });
    cuda.run([&](Stream& s) { newton_schulz(s, two->view({c.n, c.rows, c.cols}), 5); });
    expect_close("x", one, flat, kBf16Bound);
    expect_same_bits("the second run", one, two);

    std::copy(before.begin(), before.end(), x.f());
    newton_schulz(cpu, x, 0);
    cuda.run([&](Stream& s) { newton_schulz(s, still->view({c.n, c.rows, c.cols}), 0); });
    expect_close("normalised only", still, flat, tolerance(DType::bf16));
  }
}

TEST(GpuNewtonSchulz, ZeroStaysZeroBesideOthers) {
  CudaStream cuda;
  Buffer x({3, 9 * 21});
  x.normal(1);
  for (int64_t i = 0; i < 9 * 21; ++i) x[9 * 21 + i] = 0.f;
  DeviceBuffer xx(x, DType::f32);
  cuda.run([&](Stream& s) { newton_schulz(s, xx->view({3, 9, 21}), 5); });
  const std::vector<float> v = xx.values();
  for (size_t i = 0; i < v.size(); ++i) {
    ASSERT_TRUE(std::isfinite(v[i])) << i;
    if (i / (9 * 21) == 1) {
      ASSERT_EQ(v[i], 0.f) << i;
    }
  }
  cuda.run([&](Stream& s) { newton_schulz(s, device_view(xx, 0, {0, 3, 4}), 5); });  // nothing to do is fine
}

TEST(GpuNewtonSchulz, MoreMatricesThanFitIntoTheScratch) {
  CudaStream cuda;
  CpuStream cpu;
  constexpr int64_t n = 9000, m = 64, size = m * m;  // 32 KiB of scratch each: groups of 8187
  Buffer seed({1, 1 << 20}), x({n, size});
  seed.normal(5);
  for (int64_t i = 0; i < n * size; ++i) x[i] = seed[i * 7 % ((1 << 20) - 3)];
  DeviceBuffer xx(x, DType::f32);
  cuda.run([&](Stream& s) { newton_schulz(s, xx->view({n, m, m}), 5); });
  EXPECT_LE(cuda.scratch(), int64_t{256} << 20);
  EXPECT_GT(cuda.scratch(), int64_t{200} << 20);
  const std::vector<float> got = xx.values();
  for (const int64_t i : {int64_t{0}, int64_t{8186}, int64_t{8187}, int64_t{8188}, n - 1}) {
    const Tensor want = x->slice(i, 1).view({1, m, m});
    newton_schulz(cpu, want, 5);
    const Tensor mine = Tensor::of(got.data() + i * size, {1, m, m});
    EXPECT_LE(relative_error(mine, want), kBf16Bound) << "matrix " << i;
  }
}

// Three steps from random weights and momentum, on host and device.
void muon_steps(const Shape& c, const Muon& h, int64_t left, double bound) {
  CudaStream cuda;
  CpuStream cpu;
  const int64_t n = c.n * c.rows * c.cols;
  Buffer p({1, n}), g({1, n}), m({1, n});
  p.normal(1, 0.05f);
  m.normal(2);
  DeviceBuffer xp(p, DType::f32, left), xm(m, DType::f32, left), xg({1, n}, DType::f32, left);
  const auto blocks = [&](const Tensor& t) { return t.view({c.n, c.rows, c.cols}); };
  for (uint64_t step = 0; step < 3; ++step) {
    g.normal(10 + step);
    xg.upload(g);
    muon_step(cpu, h, blocks(p), blocks(g), blocks(m), 0, 0.5f);
    cuda.run([&](Stream& s) { muon_step(s, h, blocks(xp), blocks(xg), blocks(xm), 0, 0.5f); });
    expect_bits("g", xg, g);
  }
  expect_close("p", xp, p, bound);
  expect_close("m", xm, m, 1e-6);  // three steps of two fp32 roundings, fused or not
}

TEST(GpuMuon, Fp32) {
  for (const Shape& c : kShapes) {
    for (const bool nesterov : {true, false}) {
      for (const int64_t left : {0, 1}) {
        SCOPED_TRACE(text(name(c), nesterov ? " nesterov" : "", left ? " off 16 bytes" : ""));
        // The rate makes p nearly all update.
        muon_steps(c, {.lr = 1.f, .nesterov = nesterov, .fp32_newton_schulz = true}, left, kFp32Bound);
      }
    }
  }
}

TEST(GpuMuon, Bf16) {
  for (const Shape& c : kShapes) {
    SCOPED_TRACE(name(c));
    muon_steps(c, {.lr = 1.f}, 0, kBf16Bound);
  }
}

TEST(GpuMuon, Fixture) {
  const auto f = fixture("optimizer_steps");
  CudaStream cuda;
  Buffer zero({12, 20});
  zero.zero();
  DeviceBuffer p(f.tensor("p"), DType::f32), m(zero, DType::f32), g({12, 20});
  const Muon h{.lr = 1e-2f, .fp32_newton_schulz = true};
  for (int64_t i = 0; i < 4; ++i) {
    g.upload(f.tensor("g")[i]);
    cuda.run([&](Stream& s) {
      muon_step(s, h, p->view({3, 4, 20}), g->view({3, 4, 20}), m->view({3, 4, 20}), 0, 1.f);
    });
  }
  expect_close("p", p, f.tensor("muon_blocks_of_4"), 1e-5);  // fp32, step of 1e-2
  expect_close("m", m, f.tensor("muon_momentum"), 1e-6);     // four fp32 additions
}

TEST(GpuMuon, InterleavedBlocksLeaveTheirNeighboursAlone) {
  CudaStream cuda;
  CpuStream cpu;
  // kv_b: K_0 V_0 K_1 V_1 ...; with packets and without.
  for (const auto& [nope, v, c] : {std::tuple<int64_t, int64_t, int64_t>{16, 24, 40}, {3, 5, 7}}) {
    SCOPED_TRACE(text(nope, " + ", v, " rows of ", c));
    constexpr int64_t H = 3;
    const int64_t stride = (nope + v) * c;
    Buffer w({H * (nope + v), c}), g({H * (nope + v), c}), m({H * (nope + v), c});
    w.normal(1);
    g.normal(2);
    m.normal(3);
    const std::vector<float> w0(w.f(), w.f() + w->numel()), m0(m.f(), m.f() + m->numel());
    DeviceBuffer xw(w, DType::f32), xg(g, DType::f32), xm(m, DType::f32);
    const Muon h{.lr = 0.1f, .fp32_newton_schulz = true};
    for (const bool of_k : {true, false}) {
      const int64_t first = of_k ? 0 : nope * c, rows = of_k ? nope : v;
      const auto host = [&](const Buffer& b) { return Tensor::of(b.f() + first, {H, rows, c}); };
      const auto device = [&](const DeviceBuffer& b) { return device_view(b, first, {H, rows, c}); };
      muon_step(cpu, h, host(w), host(g), host(m), stride, 1.f);
      cuda.run([&](Stream& s) { muon_step(s, h, device(xw), device(xg), device(xm), stride, 1.f); });
      expect_close("w", xw, w, kFp32Bound);
      expect_close("m", xm, m, 1e-6);  // one step, two fp32 roundings
      if (!of_k) continue;
      const std::vector<float> got_w = xw.values(), got_m = xm.values();
      for (int64_t i = 0; i < H * stride; ++i) {
        const size_t at = static_cast<size_t>(i);
        if (i % stride < nope * c) continue;
        ASSERT_TRUE(got_w[at] == w0[at] && got_m[at] == m0[at]) << "V changed at " << i;
      }
    }
  }
}

TEST(GpuMuon, RateZeroLeavesBitsAndZeroGradientOnlyDecays) {
  CudaStream cuda;
  Buffer p({1, 42}), g({1, 42}), zero({1, 42});
  p.normal(1);
  g.normal(2);
  zero.zero();
  DeviceBuffer xp(p, DType::f32), xg(g, DType::f32), xm(zero, DType::f32);
  const auto step = [&](const Muon& h) {
    cuda.run([&](Stream& s) {
      muon_step(s, h, xp->view({2, 7, 3}), xg->view({2, 7, 3}), xm->view({2, 7, 3}), 0, 1.f);
    });
  };
  step({.lr = 0.f});
  expect_bits("p", xp, p);
  xg.zero();
  xm.zero();
  step({.lr = 0.5f, .weight_decay = 0.5f});              // an expert that saw no token
  for (int64_t i = 0; i < 42; ++i) p[i] = 0.75f * p[i];  // exact in binary
  expect_bits("decayed", xp, p);
}

// ---------------------------------------------------------------- QK-clip

TEST(GpuQkClip, Bits) {
  CudaStream cuda;
  CpuStream cpu;
  constexpr int64_t H = 5, nope = 6, rope = 3, v = 4;
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const auto& [in, c, left, right] :
       {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 1, 0, 0}, {1032, 20, 4, 8}, {301, 17, 1, 2}}) {
    SCOPED_TRACE(text(in, " and ", c, " columns, padded ", left, "+", right));
    Buffer q({H * (nope + rope), in}), kv({H * (nope + v), c}), most({1, H});
    q.normal(1);
    kv.normal(2);
    const float logits[H] = {99.f, 250.f, inf, 100.5f, std::numeric_limits<float>::quiet_NaN()};
    std::copy(logits, logits + H, most.f());
    DeviceBuffer xq(q, DType::f32, left, right), xkv(kv, DType::f32, left, right), xmost(most, DType::f32);
    qk_clip(cpu, q, kv, most->view({H}), 100.f, nope, rope, v);
    cuda.run([&](Stream& s) { qk_clip(s, xq, xkv, xmost->view({H}), 100.f, nope, rope, v); });
    expect_bits("w_q", xq, q);  // the same IEEE division, root and products
    expect_bits("w_kv", xkv, kv);
  }
}

// ---------------------------------------------------------------- MXFP4

// Gaussian groups of all magnitudes down to subnormals, and groups with something special in them.
void fill_groups(const Buffer& w) {
  Buffer z({w->rows(), w->cols()});
  z.normal(7);
  const float special[] = {0.f,
                           -0.f,
                           .25f,
                           -.75f,
                           1.25f,
                           1.75f,
                           -2.5f,
                           3.5f,
                           5.f,
                           7.999f,
                           1e-45f,
                           3e-39f,
                           3.4e38f,
                           std::nextafter(8.f, 0.f),
                           std::nextafter(4.f, 0.f),
                           6.f};
  const int64_t groups = w->numel() / 32;
  for (int64_t i = 0; i < groups; ++i) {
    const float size = std::exp2(static_cast<float>(i * 37 % 270 - 145));
    for (int64_t j = 0; j < 32; ++j) {
      float& x = w[i * 32 + j];
      x = z[i * 32 + j] * size;
      if (i % 5 == 1) x = special[(i / 5 + j) % 10] * (j % 3 == 0 ? -1.f : 1.f);                  // ties
      if (i % 11 == 2) x = j == i % 32 ? special[i % 16] : j % 2 == 0 ? 0.f : -0.f;               // one number, or none
      if (i % 13 == 3 && j == i % 32) x = i % 2 ? std::numeric_limits<float>::infinity() : -NAN;  // no number
    }
  }
}

TEST(GpuMxfp4, Bits) {
  CudaStream cuda;
  CpuStream cpu;
  struct Case {
    int64_t rows, cols, left, right;
  };
  // One group; a ragged last block; column blocks with and without room for wide accesses; rows cut by no block.
  for (const Case& c :
       {Case{1, 32, 0, 0}, {3, 96, 0, 0}, {37, 64, 4, 8}, {37, 64, 1, 2}, {301, 4128, 0, 0}, {0, 32, 0, 0}}) {
    SCOPED_TRACE(text(c.rows, " x ", c.cols, " padded ", c.left, "+", c.right));
    Buffer w({c.rows, c.cols}), back({c.rows, c.cols}), fake({c.rows, c.cols});
    Buffer packed({c.rows, c.cols / 2}, DType::u8), scale({c.rows, c.cols / 32}, DType::u8);
    fill_groups(w);
    mxfp4_pack(cpu, packed, scale, w);
    mxfp4_unpack(cpu, back, packed, scale);
    mxfp4_fake_quantize(cpu, fake, w);
    DeviceBuffer xw(w, DType::f32, c.left, c.right), xback({c.rows, c.cols}, DType::f32, c.left, c.right);
    DeviceBuffer xfake({c.rows, c.cols}, DType::f32, c.right, c.left);
    DeviceBuffer xpacked({c.rows, c.cols / 2}, DType::u8, c.left, c.right);
    DeviceBuffer xscale({c.rows, c.cols / 32}, DType::u8, c.right, c.left);
    cuda.run([&](Stream& s) {
      mxfp4_pack(s, xpacked, xscale, xw);
      mxfp4_unpack(s, xback, xpacked, xscale);
      mxfp4_fake_quantize(s, xfake, xw);
    });
    expect_bits("packed", xpacked, packed);
    expect_bits("scale", xscale, scale);
    expect_bits("unpacked", xback, back);
    expect_bits("fake", xfake, fake);
    expect_bits("w", xw, w);
  }
}

}  // namespace
}  // namespace kestrel::test
