#include "kernels/short_conv/short_conv.h"

#include "kernels/core/elementwise.h"
#include "tests/kernels/norm/naive.h"

namespace kestrel::test {
namespace {

// At most 8 products, one exponential good to 3e-7.
constexpr double kNaive = 2e-6;

struct Shape {
  int64_t B, T, C, W;
};

// x [B,T,C], w [C,W], start [B,T] or empty, history [B,W-1,C] or empty.
Doubles naive(const Shape& n, const Doubles& x, const Doubles& w, const std::vector<int32_t>& start,
              const Doubles& history = {}) {
  Doubles y(x.size());
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t t = 0; t < n.T; ++t) {
      for (int64_t c = 0; c < n.C; ++c) {
        double u = 0;
        for (int64_t i = 0; i < n.W; ++i) {
          const int64_t from = t - (n.W - 1) + i;
          if (!start.empty() && from < start[static_cast<size_t>(b * n.T + t)]) continue;
          double v = 0;
          if (from >= 0) {
            v = x[static_cast<size_t>((b * n.T + from) * n.C + c)];
          } else if (!history.empty()) {
            v = history[static_cast<size_t>((b * (n.W - 1) + n.W - 1 + from) * n.C + c)];
          }
          u += w[static_cast<size_t>(c * n.W + i)] * v;
        }
        y[static_cast<size_t>((b * n.T + t) * n.C + c)] = u / (1 + std::exp(-u));
      }
    }
  }
  return y;
}

class ShortConvGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Fixtures, ShortConvGolden, testing::Values("short_conv", "short_conv_packed"));

TEST_P(ShortConvGolden, MatchesFixture) {
  const SafetensorsFile f = fixture(GetParam());
  const int64_t B = f.tensor("x").dim(0), T = f.tensor("x").dim(1), C = f.tensor("x").dim(2);
  const Tensor x = f.tensor("x").view({B * T, C}), w = f.tensor("w");
  CpuStream s;
  Buffer start_memory({B, T}, DType::i32), y({B * T, C}), dx({B * T, C}), dw({C, 1, 4});
  Tensor start;
  if (f.has("segment")) document_starts(s, start = start_memory, f.tensor("segment"));
  short_conv_forward(s, B, T, y, x, w, start);
  EXPECT_LE(relative_error(y, f.tensor("out")), 1e-5);  // golden bounds of the house
  dw.zero();
  short_conv_backward(s, B, T, dx, dw, f.tensor("d_out"), x, w, start);
  EXPECT_LE(relative_error(dx, f.tensor("d_x")), 1e-4);
  EXPECT_LE(relative_error(dw, f.tensor("d_w")), 1e-4);
}

class ShortConvShapes : public testing::TestWithParam<Shape> {};
// One token, rows shorter than the kernel, more than one piece of 64 rows, more than one block of 128 channels, every
// extreme of W.
INSTANTIATE_TEST_SUITE_P(Awkward, ShortConvShapes,
                         testing::Values(Shape{1, 1, 1, 4}, Shape{3, 2, 5, 4}, Shape{2, 67, 3, 4}, Shape{1, 130, 2, 8},
                                         Shape{2, 5, 131, 3}, Shape{1, 9, 7, 1}, Shape{2, 7, 4, 2}));

TEST_P(ShortConvShapes, ColumnBlocksWithDocumentsAgreeWithDifferences) {
  const Shape n = GetParam();
  const int64_t N = n.B * n.T;
  CpuStream s;
  Buffer x0({N, n.C}), w({n.C, n.W}), dy0({N, n.C}), dw({n.C, n.W}), start({n.B, n.T}, DType::i32);
  x0.normal(1), w.normal(2, 0.5f), dy0.normal(3), dw.normal(4);
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < N; ++i) {  // documents of 3, 1 and 7 tokens, so that one starts at the border of a piece too
    const int64_t t = i % n.T, within = t % 11;
    starts.push_back(static_cast<int32_t>(t - (within < 3 ? within : within < 4 ? 0 : within - 4)));
    start->i32()[i] = starts.back();
  }
  for (const bool packed : {false, true}) {
    const Tensor document_start = packed ? *start : Tensor{};
    const std::vector<int32_t> naive_start = packed ? starts : std::vector<int32_t>{};
    Block x(N, n.C), y(N, n.C), dy(N, n.C), dx(N, n.C);
    x.copy(x0), dy.copy(dy0);
    const Doubles dw_before = doubles(dw);
    short_conv_forward(s, n.B, n.T, y, x, w, document_start);
    short_conv_backward(s, n.B, n.T, dx, dw, dy, x, w, document_start);

    Doubles vx = doubles(x0), vw = doubles(w);
    const Doubles vdy = doubles(dy0);
    auto loss = [&] { return inner(naive(n, vx, vw, naive_start), vdy); };
    EXPECT_LE(relative_error(y, naive(n, vx, vw, naive_start)), kNaive);
    EXPECT_LE(relative_error(dx, differences(vx, loss)), kNaive);
    Doubles dw_want = differences(vw, loss);
    for (size_t i = 0; i < dw_want.size(); ++i) dw_want[i] += dw_before[i];
    EXPECT_LE(relative_error(dw, dw_want), kNaive);
    EXPECT_TRUE(y.untouched() && dx.untouched());
  }
}

TEST(ShortConv, DecodingWithHistoryGivesTheBitsOfTheWholeRow) {
  const int64_t B = 2, T = 9, C = 13, W = 4;
  CpuStream s;
  Buffer x({B * T, C}), w({C, W}), whole({B * T, C}), history({B * (W - 1), C}), step({B, C}), out({B, C});
  x.normal(1), w.normal(2), history.zero();
  short_conv_forward(s, B, T, whole, x, w, {});
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t b = 0; b < B; ++b) std::memcpy(step.f() + b * C, x.f() + (b * T + t) * C, C * sizeof(float));
    short_conv_forward(s, B, 1, out, step, w, {}, history);
    for (int64_t b = 0; b < B; ++b) {
      // Before the row the history is zeros, whose products may turn -0 into +0 but no other value.
      for (int64_t c = 0; c < C; ++c) EXPECT_EQ(out[b * C + c], whole[(b * T + t) * C + c]);
      float* h = history.f() + b * (W - 1) * C;
      std::memmove(h, h + C, static_cast<size_t>((W - 2) * C) * sizeof(float));
      std::memcpy(h + (W - 2) * C, step.f() + b * C, C * sizeof(float));
    }
  }
}

TEST(ShortConv, HistoryOfSeveralTokensMatchesNaive) {
  const Shape n{2, 5, 3, 4};
  CpuStream s;
  Buffer x({n.B * n.T, n.C}), w({n.C, n.W}), y({n.B * n.T, n.C}), start({n.B, n.T}, DType::i32);
  Buffer history0({n.B * (n.W - 1), n.C});
  x.normal(1), w.normal(2), history0.normal(3), start.zero();
  Block history(n.B * (n.W - 1), n.C);
  history.copy(history0);
  short_conv_forward(s, n.B, n.T, y, x, w, {}, history);
  EXPECT_LE(relative_error(y, naive(n, doubles(x), doubles(w), {}, doubles(history0))), kNaive);
  short_conv_forward(s, n.B, n.T, y, x, w, start, history);  // every token's document starts at 0: history is hidden
  EXPECT_LE(relative_error(y, naive(n, doubles(x), doubles(w), {})), kNaive);
}

TEST(ShortConv, BitsDoNotDependOnTheThreadCount) {
  const int64_t B = 2, T = 150, C = 140, W = 4;
  Buffer x({B * T, C}), w({C, W}), dy({B * T, C});
  x.normal(1), w.normal(2), dy.normal(3);
  auto run = [&](int threads, Buffer& y, Buffer& dx, Buffer& dw) {
    with_threads(threads, [&] {
      CpuStream s;
      dw.zero();
      short_conv_forward(s, B, T, y, x, w, {});
      short_conv_backward(s, B, T, dx, dw, dy, x, w, {});
    });
  };
  Buffer y1({B * T, C}), dx1({B * T, C}), dw1({C, W}), y2({B * T, C}), dx2({B * T, C}), dw2({C, W});
  run(1, y1, dx1, dw1);
  run(2, y2, dx2, dw2);
  EXPECT_TRUE(same_bits(y1, y2) && same_bits(dx1, dx2) && same_bits(dw1, dw2));
}

TEST(ShortConv, PlanningEmptyAndWrongShapes) {
  Arena planner = Arena::planner(Device::cpu);
  Stream p(planner);
  const Tensor px = p.temp({130, 8}), pw = p.temp({8, 4});
  const int64_t before = planner.peak();
  short_conv_backward(p, 1, 130, px, pw, px, px, pw, {});
  EXPECT_GE(planner.peak(), before + 3 * 4 * 8 * 4);  // three pieces of [W, C] F32

  CpuStream s;
  Buffer none({0, 8}), x({6, 8}), y({6, 8}), w({8, 4}), wide({8, 9}), start({3, 2}, DType::i32), dw({8, 4});
  x.normal(1), w.normal(2), wide.normal(3), dw.normal(4);
  const Doubles kept = doubles(dw);
  short_conv_forward(s, 2, 0, none, none, w, {});
  short_conv_backward(s, 0, 7, none, dw, none, none, w, {});
  EXPECT_EQ(doubles(dw), kept);
  EXPECT_THROW(short_conv_forward(s, 2, 4, y, x, w, {}), ContractError);
  EXPECT_THROW(short_conv_forward(s, 2, 3, y, x, wide, {}), ContractError);
  EXPECT_THROW(short_conv_forward(s, 2, 3, y, x, w, start), ContractError);
  EXPECT_THROW(short_conv_forward(s, 2, 3, y, x, w, {}, x->slice(0, 5)), ContractError);
}

}  // namespace
}  // namespace kestrel::test
