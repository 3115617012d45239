#include <omp.h>

#include <limits>

#include "kernels/core/elementwise.h"
#include "kernels/experts/experts.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::Buffer;
using test::CpuStream;
using test::relative_error;

constexpr int64_t kArena = int64_t{16} << 20;
const float kNan = std::numeric_limits<float>::quiet_NaN();

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

struct OwnedPlan {
  Buffer row_of, token_of, offsets;
  OwnedPlan(int64_t N, int64_t slots, int64_t E)
      : row_of({N, slots}, DType::i32), token_of({N * slots}, DType::i32), offsets({E + 1}, DType::i64) {}
  operator DispatchPlan() const { return {row_of, token_of, offsets}; }
  int64_t rows() const { return offset(offsets->numel() - 1); }
  int64_t offset(int64_t e) const { return offsets->as<int64_t>()[e]; }
};

// Random distinct experts per token; the last `unused` slots of every third token are empty.
void random_index(Buffer& index, int64_t E, int64_t unused, uint64_t seed) {
  std::mt19937_64 rng(seed);
  const int64_t slots = index->cols();
  for (int64_t n = 0; n < index->rows(); ++n) {
    const int64_t first = static_cast<int64_t>(rng() % static_cast<uint64_t>(E));
    for (int64_t j = 0; j < slots; ++j) {
      index->i32()[n * slots + j] =
          n % 3 == 1 && j >= slots - unused ? -1 : static_cast<int32_t>((first + j * j + j) % E);
    }
  }
}

TEST(DispatchPlan, SortsStablyByExpert) {
  for (auto [N, slots, E] : {std::array<int64_t, 3>{1, 1, 1}, {50, 3, 16}, {130, 8, 64}, {7, 2, 900}}) {
    Buffer index({N, slots}, DType::i32);
    random_index(index, E, 1, 5);
    OwnedPlan plan(N, slots, E);
    CpuStream s(kArena);
    dispatch_plan(s, plan, index);
    // from the definition: experts in order, tokens in order, slots in order
    int64_t row = 0;
    for (int64_t e = 0; e < E; ++e) {
      EXPECT_EQ(plan.offset(e), row);
      for (int64_t i = 0; i < N * slots; ++i) {
        if (index->i32()[i] != e) continue;
        EXPECT_EQ(plan.row_of->i32()[i], row);
        EXPECT_EQ(plan.token_of->i32()[row], i / slots);
        ++row;
      }
    }
    EXPECT_EQ(plan.rows(), row);
    for (int64_t i = 0; i < N * slots; ++i) {
      if (index->i32()[i] < 0) {
        EXPECT_EQ(plan.row_of->i32()[i], -1);
      }
    }
    for (int64_t r = row; r < N * slots; ++r) EXPECT_EQ(plan.token_of->i32()[r], -1) << "written beyond the last row";
  }
}

TEST(DispatchPlan, RefusesUnknownExperts) {
  for (int32_t bad : {4, -2}) {
    Buffer index({1, 2}, DType::i32);
    index->i32()[0] = 0;
    index->i32()[1] = bad;
    OwnedPlan plan(1, 2, 4);
    CpuStream s(kArena);
    EXPECT_THROW(dispatch_plan(s, plan, index), ContractError);
  }
}

TEST(Rows, GatherAndSumAreTransposes) {
  const int64_t N = 75, slots = 4, E = 9, width = 13;
  Buffer index({N, slots}, DType::i32), x({N, width + 3}), rows({N * slots, width}), y({N, width});
  random_index(index, E, 2, 6);
  OwnedPlan plan(N, slots, E);
  CpuStream s(kArena);
  dispatch_plan(s, plan, index);
  x.normal(1);
  gather_rows(s, rows, x->columns(2, width), plan);
  for (int64_t r = 0; r < plan.rows(); ++r) {
    for (int64_t c = 0; c < width; ++c) {
      EXPECT_EQ(rows[r * width + c], x[plan.token_of->i32()[r] * (width + 3) + 2 + c]);
    }
  }
  for (int64_t i = plan.rows() * width; i < rows->numel(); ++i) EXPECT_TRUE(std::isnan(rows[i]));
  Buffer other({N * slots, width});
  other.normal(2);
  for (int64_t i = plan.rows() * width; i < other->numel(); ++i) other[i] = kNan;  // never read
  sum_rows(s, y, other, plan);
  double left = 0, right = 0;  // <gather(x), other> = <x, sum(other)>
  for (int64_t i = 0; i < plan.rows() * width; ++i) left += double{rows[i]} * double{other[i]};
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t c = 0; c < width; ++c) right += double{x[n * (width + 3) + 2 + c]} * double{y[n * width + c]};
  }
  EXPECT_NEAR(left, right, 1e-4);  // y holds fp32 sums of up to four values
}

TEST(Rows, SumGoesThroughTheSlotsInOrder) {
  // 1e8 + 1 - 1e8 in fp32 is 0 in this order and 1 in another
  Buffer index({2, 3}, DType::i32), rows({6, 1}), y({2, 1});
  const int32_t ids[6] = {2, 0, 1, -1, -1, -1};
  std::copy(ids, ids + 6, index->i32());
  OwnedPlan plan(2, 3, 3);
  CpuStream s(kArena);
  dispatch_plan(s, plan, index);
  rows[2] = 1e8f;
  rows[0] = 1.f;
  rows[1] = -1e8f;
  sum_rows(s, y, rows, plan);
  EXPECT_EQ(y[0], 0.f);
  EXPECT_EQ(y[1], 0.f) << "a token without experts gets zeros";
}

TEST(Rows, ScalarsGoThereAndBack) {
  const int64_t N = 31, slots = 3;
  Buffer index({N, slots}, DType::i32), value({N, slots}), back({N, slots}), rows({N * slots});
  random_index(index, 5, 1, 7);
  OwnedPlan plan(N, slots, 5);
  CpuStream s(kArena);
  dispatch_plan(s, plan, index);
  value.normal(1);
  gather_slots(s, rows, value, plan);
  scatter_slots(s, back, rows, plan);
  for (int64_t i = 0; i < N * slots; ++i) EXPECT_EQ(back[i], index->i32()[i] < 0 ? 0.f : value[i]);
  for (int64_t r = plan.rows(); r < N * slots; ++r) EXPECT_TRUE(std::isnan(rows[r]));
}

// Leaving tokens out (all slots -1) moves rows but changes no bit of what the other tokens get (every expert keeps more
// than two rows here, so all products take the same path).
TEST(Rows, MaskedTokensShiftNothing) {
  const int64_t N = 60, slots = 2, E = 6, in = 10, out = 7;
  Buffer index({N, slots}, DType::i32), masked({N, slots}, DType::i32), x({N, in}), w({E, out, in});
  random_index(index, E, 0, 8);
  masked.copy(index);
  for (int64_t n = 0; n < N; n += 10) masked->i32()[n * slots] = masked->i32()[n * slots + 1] = -1;
  x.normal(1);
  w.normal(2);
  Buffer y_all({N, out}), y_masked({N, out});
  for (auto [ids, y] : {std::pair<Buffer*, Buffer*>{&index, &y_all}, {&masked, &y_masked}}) {
    OwnedPlan plan(N, slots, E);
    Buffer rows({N * slots, in}), outs({N * slots, out});
    CpuStream s(kArena);
    dispatch_plan(s, plan, *ids);
    gather_rows(s, rows, x, plan);
    grouped_linear_forward(s, outs, rows, w, plan.offsets);
    sum_rows(s, *y, outs, plan);
  }
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t c = 0; c < out; ++c) EXPECT_EQ(y_masked[n * out + c], n % 10 == 0 ? 0.f : y_all[n * out + c]);
  }
}

// Products of ragged groups in fp64.
struct Grouped {
  int64_t E, in, out, room;
  Buffer offsets, x, w, dy, y, dx, dw;
  Grouped(std::vector<int64_t> counts, int64_t in_, int64_t out_, int64_t spare)
      : E(static_cast<int64_t>(counts.size())),
        in(in_),
        out(out_),
        room(total(counts) + spare),
        offsets({E + 1}, DType::i64),
        x({room, in}),
        w({E, out, in}),
        dy({room, out}),
        y({room, out}),
        dx({room, in}),
        dw({E, out, in}) {
    int64_t* o = offsets->as<int64_t>();
    o[0] = 0;
    for (int64_t e = 0; e < E; ++e) o[e + 1] = o[e] + counts[static_cast<size_t>(e)];
    x.normal(1);
    w.normal(2);
    dy.normal(3);
    dw.normal(4);
    for (int64_t r = o[E]; r < room; ++r) {  // spare rows are poison: reading one shows
      std::fill_n(x.f() + r * in, in, kNan);
      std::fill_n(dy.f() + r * out, out, kNan);
    }
  }
  static int64_t total(const std::vector<int64_t>& counts) {
    int64_t n = 0;
    for (int64_t c : counts) n += c;
    return n;
  }
  void run() {
    CpuStream s(kArena);
    grouped_linear_forward(s, y, x, w, offsets);
    grouped_linear_backward_input(s, dx, dy, w, offsets);
    grouped_linear_backward_weight(s, dw, dy, x, offsets);
  }
};

void expect_product(const Grouped& g, const Buffer& dw_before) {
  const int64_t* o = g.offsets->as<int64_t>();
  double worst = 0;
  for (int64_t e = 0; e < g.E; ++e) {
    const float* w = g.w.f() + e * g.out * g.in;
    std::vector<double> dw(static_cast<size_t>(g.out * g.in));
    for (int64_t r = o[e]; r < o[e + 1]; ++r) {
      std::vector<double> dx(static_cast<size_t>(g.in));
      for (int64_t j = 0; j < g.out; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < g.in; ++i) {
          sum += double{g.x[r * g.in + i]} * double{w[j * g.in + i]};
          dx[static_cast<size_t>(i)] += double{g.dy[r * g.out + j]} * double{w[j * g.in + i]};
          dw[static_cast<size_t>(j * g.in + i)] += double{g.dy[r * g.out + j]} * double{g.x[r * g.in + i]};
        }
        worst = std::max(worst, std::fabs(sum - double{g.y[r * g.out + j]}) / std::sqrt(static_cast<double>(g.in)));
      }
      for (int64_t i = 0; i < g.in; ++i) {
        const double error = std::fabs(dx[static_cast<size_t>(i)] - double{g.dx[r * g.in + i]});
        worst = std::max(worst, error / std::sqrt(static_cast<double>(g.out)));
      }
    }
    const int64_t n = o[e + 1] - o[e];
    for (int64_t i = 0; i < g.out * g.in; ++i) {
      const int64_t at = e * g.out * g.in + i;
      if (n == 0) {
        EXPECT_EQ(std::memcmp(&g.dw[at], &dw_before[at], 4), 0) << "an expert without rows was touched";
        continue;
      }
      const double error = std::fabs(double{dw_before[at]} + dw[static_cast<size_t>(i)] - double{g.dw[at]});
      worst = std::max(worst, error / std::sqrt(static_cast<double>(n)));
    }
  }
  // an fp32 sum of n products of N(0,1) numbers errs by a few 1e-7 sqrt(n); the largest of 1e5 such errors by 2e-6
  EXPECT_LE(worst, 3e-6);
  for (int64_t i = o[g.E] * g.out; i < g.y->numel(); ++i) EXPECT_TRUE(std::isnan(g.y[i])) << "a spare row was written";
  for (int64_t i = o[g.E] * g.in; i < g.dx->numel(); ++i) EXPECT_TRUE(std::isnan(g.dx[i])) << "a spare row was written";
}

TEST(GroupedLinear, EqualsTheDefinition) {
  for (auto& counts : {std::vector<int64_t>{1}, {0}, {4, 0, 3}, {0, 0, 129, 0, 128, 1, 0}, {300, 2}, {0, 0}}) {
    for (auto [in, out] : {std::pair<int64_t, int64_t>{1, 1}, {19, 33}, {64, 130}}) {
      Grouped g(counts, in, out, 5);
      Buffer before({g.E, out, in});
      before.copy(g.dw);
      g.run();
      expect_product(g, before);
    }
  }
}

// The gradient of an expert without rows keeps even a NaN; the others' start value is added to, not overwritten.
TEST(GroupedLinear, EmptyExpertIsLeftAlone) {
  Grouped g({4, 0, 3}, 6, 5, 0);
  for (int64_t i = 0; i < 30; ++i) g.dw[30 + i] = kNan;
  Buffer before({3, 5, 6});
  before.copy(g.dw);
  g.run();
  expect_product(g, before);
}

TEST(GroupedLinear, SameBitsForEveryThreadCountAndRun) {
  const int threads = omp_get_max_threads();
  Grouped first({130, 0, 7, 260, 1}, 40, 30, 3);
  omp_set_num_threads(1);
  first.run();
  for (int run = 0; run < 10; ++run) {
    omp_set_num_threads(1 + run % 2);
    Grouped g({130, 0, 7, 260, 1}, 40, 30, 3);
    g.run();
    EXPECT_TRUE(same_bits(g.y, first.y) && same_bits(g.dx, first.dx) && same_bits(g.dw, first.dw));
  }
  omp_set_num_threads(threads);
}

// A whole routed layer, 100 times on poisoned memory: the same bits each time.
TEST(GroupedLinear, WholeDispatchRepeats) {
  const int64_t N = 90, slots = 3, E = 8, width = 16;
  Buffer index({N, slots}, DType::i32), x({N, width}), w({E, width, width}), dy({N, width});
  random_index(index, E, 1, 9);
  x.normal(1);
  w.normal(2);
  dy.normal(3);
  Buffer y0({N, width}), dx0({N, width}), dw0({E, width, width});
  const int threads = omp_get_max_threads();
  for (int run = 0; run < 100; ++run) {
    omp_set_num_threads(1 + run % 2);
    OwnedPlan plan(N, slots, E);
    Buffer rows({N * slots, width}), outs({N * slots, width}), drows({N * slots, width}), douts({N * slots, width});
    Buffer y({N, width}), dx({N, width}), dw({E, width, width});
    dw.zero();
    CpuStream s(kArena);
    dispatch_plan(s, plan, index);
    gather_rows(s, rows, x, plan);
    grouped_linear_forward(s, outs, rows, w, plan.offsets);
    sum_rows(s, y, outs, plan);
    gather_rows(s, douts, dy, plan);
    grouped_linear_backward_input(s, drows, douts, w, plan.offsets);
    grouped_linear_backward_weight(s, dw, douts, rows, plan.offsets);
    sum_rows(s, dx, drows, plan);
    if (run == 0) {
      y0.copy(y);
      dx0.copy(dx);
      dw0.copy(dw);
    }
    ASSERT_TRUE(same_bits(y, y0) && same_bits(dx, dx0) && same_bits(dw, dw0)) << "run " << run;
    for (int64_t i = 0; i < y->numel(); ++i) ASSERT_TRUE(std::isfinite(y[i]) && std::isfinite(dx[i]));
  }
  omp_set_num_threads(threads);
}

TEST(GroupedLinear, RefusesABufferTooSmall) {
  Grouped g({4, 3}, 6, 5, 0);
  g.offsets->as<int64_t>()[2] = 8;
  EXPECT_THROW(g.run(), ContractError);
}

TEST(DispatchPlan, NoTokens) {
  OwnedPlan plan(0, 2, 3);
  Buffer index({0, 2}, DType::i32), x({0, 4}), rows({0, 4});
  CpuStream s(kArena);
  dispatch_plan(s, plan, index);
  gather_rows(s, rows, x, plan);
  sum_rows(s, x, rows, plan);
  for (int64_t e = 0; e <= 3; ++e) EXPECT_EQ(plan.offset(e), 0);
}

TEST(DispatchPlan, PlanningTouchesNothing) {
  Arena arena = Arena::planner(Device::cpu);
  Stream s(arena);
  const auto fake = [&](std::initializer_list<int64_t> shape, DType t) { return arena.keep(shape, t, "t"); };
  const DispatchPlan plan{fake({9, 2}, DType::i32), fake({18}, DType::i32), fake({5}, DType::i64)};
  const Tensor rows = fake({18, 6}, DType::f32), w = fake({4, 6, 6}, DType::f32), x = fake({9, 6}, DType::f32);
  const int64_t kept = arena.peak();
  dispatch_plan(s, plan, fake({9, 2}, DType::i32));
  gather_rows(s, rows, x, plan);
  grouped_linear_forward(s, rows, rows, w, plan.offsets);
  grouped_linear_backward_input(s, rows, rows, w, plan.offsets);
  grouped_linear_backward_weight(s, w, rows, rows, plan.offsets);
  sum_rows(s, x, rows, plan);
  EXPECT_GT(arena.peak(), kept);
}

}  // namespace
}  // namespace kestrel
