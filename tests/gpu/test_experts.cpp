// Dispatch and combine on the GPU against the CPU.
#include <limits>
#include <memory>

#include "gpu/support.h"
#include "kernels/experts/experts.h"

namespace kestrel::test {
namespace {

struct Case {
  int64_t N, slots, E, D, left;
};
// One token, one expert, many; widths that are and are not whole 16-byte packets, one chunk of a warp and several; more
// experts than pairs; pieces that end inside a token; more experts than eight warps have counters for; more slots than
// lanes; more pieces than a thread of the scan holds at a time; no tokens, no slots.
constexpr Case kCases[] = {{1, 1, 1, 1, 0},       {3, 2, 4, 7, 1},      {300, 3, 5, 64, 0},     {1000, 8, 64, 136, 8},
                           {257, 16, 896, 40, 0}, {40, 7, 2000, 24, 8}, {4096, 8, 64, 1024, 0}, {400, 7, 7000, 4, 0},
                           {50, 40, 64, 2504, 8}, {30, 5, 3, 300, 1},   {70000, 8, 7, 8, 0},    {0, 2, 3, 8, 0},
                           {5, 0, 3, 8, 0}};

void check(const Case& c, DType t, bool some_unused) {
  CudaStream cuda;
  CpuStream cpu;
  const int64_t R = c.N * c.slots;
  Buffer index({c.N, c.slots}, DType::i32), row_of({c.N, c.slots}, DType::i32), token_of({R}, DType::i32);
  Buffer offsets({c.E + 1}, DType::i64), x({c.N, c.D}), rows({R, c.D}), y({c.N, c.D}), value({c.N, c.slots}), p({R});
  Buffer back({c.N, c.slots});
  std::mt19937_64 rng(11);
  for (int64_t i = 0; i < R; ++i) {
    // Unequal loads, experts 0 and E/2 favoured.
    const uint64_t u = rng();
    const int64_t e =
        u % 3 == 0 ? 0 : (u % 3 == 1 ? c.E / 2 : static_cast<int64_t>(u / 3 % static_cast<uint64_t>(c.E)));
    index->i32()[i] = some_unused && u % 7 == 0 ? -1 : static_cast<int32_t>(e);
  }
  x.normal(1);
  rows.normal(2);
  value.normal(3);
  p.normal(4);
  round_to(t, x);
  round_to(t, rows);
  const DispatchPlan plan{row_of, token_of, offsets};
  dispatch_plan(cpu, plan, index);
  const int64_t used = offsets->as<int64_t>()[c.E];

  DeviceBuffer xindex({c.N, c.slots}, DType::i32, 0, 1), xrow_of({c.N, c.slots}, DType::i32),
      xtoken_of({R}, DType::i32);
  DeviceBuffer xoffsets({c.E + 1}, DType::i64);
  xindex.upload(index);
  const DispatchPlan device{xrow_of, xtoken_of, xoffsets};
  cuda.run([&](Stream& s) { dispatch_plan(s, device, xindex); });
  expect_equal("row_of", xrow_of, integers(row_of));
  // token_of beyond the rows in use stays as it was: 0xff.
  expect_equal("token_of", xtoken_of, integers(token_of));
  const std::vector<char> raw = xoffsets.raw();
  EXPECT_EQ(std::memcmp(raw.data(), offsets->data, raw.size()), 0) << "offsets";
  if (::testing::Test::HasFailure()) return;

  // rows: poisoned beyond the rows in use; they must neither be written nor read.
  DeviceBuffer xx(x, t, c.left, 0), xrows({R, c.D}, t, c.left, 8), filled(rows, t, c.left, 8),
      xy({c.N, c.D}, t, 0, c.left);
  cuda.run([&](Stream& s) { gather_rows(s, xrows, xx, device); });
  const std::vector<float> g = xrows.values();
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t d = 0; d < c.D; ++d) {
      const float got = g[static_cast<size_t>(r * c.D + d)];
      const bool good = r < used ? got == x[token_of->i32()[r] * c.D + d] : std::isnan(got);
      if (good) continue;
      ADD_FAILURE() << "gathered [" << r << "," << d << "] is " << got << ", rows in use " << used;
      return;
    }
  }
  Buffer poisoned({R, c.D});
  poisoned.copy(rows);
  for (int64_t i = used * c.D; i < R * c.D; ++i) poisoned[i] = std::numeric_limits<float>::quiet_NaN();
  filled.upload(poisoned);
  sum_rows(cpu, y, rows, plan);
  cuda.run([&](Stream& s) { sum_rows(s, xy, filled, device); });
  expect_close("sum", xy, y, t == DType::bf16 ? 3e-3 : 1e-6);  // the same fp32 sum in the same order, rounded once
  DeviceBuffer xy2({c.N, c.D}, t, 0, c.left);
  cuda.run([&](Stream& s) { sum_rows(s, xy2, filled, device); });
  expect_same_bits("sum again", xy, xy2);

  DeviceBuffer xvalue(value, DType::f32, 1, 0), xp({R}), xback({c.N, c.slots}, DType::f32, 0, 3);
  cuda.run([&](Stream& s) {
    gather_slots(s, xp, xvalue, device);
    scatter_slots(s, xback, xp, device);
  });
  gather_slots(cpu, p, value, plan);
  scatter_slots(cpu, back, p, plan);
  const std::vector<float> gp = xp.values();
  for (int64_t r = 0; r < R; ++r) {
    const float got = gp[static_cast<size_t>(r)];
    EXPECT_TRUE(r < used ? got == p[r] : std::isnan(got)) << "slot value of row " << r << " is " << got;
  }
  expect_close("scattered", xback, back, 0.0);
}

TEST(GpuExperts, PlanGatherAndSum) {
  for (const Case& c : kCases) {
    for (const DType t : {DType::f32, DType::bf16}) {
      for (const bool some_unused : {false, true}) {
        SCOPED_TRACE(
            text(name_of(t), " N ", c.N, " slots ", c.slots, " E ", c.E, " D ", c.D, some_unused ? " unused" : ""));
        check(c, t, some_unused);
      }
    }
  }
}

TEST(GpuExperts, IndexOutsideCountsAsUnused) {
  CudaStream cuda;
  CpuStream cpu;
  constexpr int64_t N = 3, slots = 3, E = 3;
  const int32_t given[] = {0, E, -7, 2, INT32_MAX, 1, INT32_MIN, 2, 0};
  const int32_t meant[] = {0, -1, -1, 2, -1, 1, -1, 2, 0};
  Buffer index({N, slots}, DType::i32), row_of({N, slots}, DType::i32), token_of({N * slots}, DType::i32);
  Buffer offsets({E + 1}, DType::i64);
  std::copy(std::begin(meant), std::end(meant), index->i32());
  dispatch_plan(cpu, {row_of, token_of, offsets}, index);
  std::copy(std::begin(given), std::end(given), index->i32());
  DeviceBuffer xindex({N, slots}, DType::i32, 2, 1), xrow_of({N, slots}, DType::i32),
      xtoken_of({N * slots}, DType::i32), xoffsets({E + 1}, DType::i64);
  xindex.upload(index);
  cuda.run([&](Stream& s) { dispatch_plan(s, {xrow_of, xtoken_of, xoffsets}, xindex); });
  expect_equal("row_of", xrow_of, integers(row_of));
  expect_equal("token_of", xtoken_of, integers(token_of));
  const std::vector<char> raw = xoffsets.raw();
  EXPECT_EQ(std::memcmp(raw.data(), offsets->data, raw.size()), 0) << "offsets";
}

// 2050 rows of 2^20 elements, 4.3 GB: from row 2048 on an element's number does not fit into 31 bits.
TEST(GpuExperts, RowsBeyond32BitOffsets) {
  CudaStream cuda;
  constexpr int64_t N = 2, slots = 1025, D = int64_t{1} << 20, R = N * slots;
  Buffer index({N, slots}, DType::i32), x({N, D}), sum({N, D});
  index.zero();
  for (int64_t i = 0; i < N * D; ++i) {
    x[i] = static_cast<float>(i * 7 % 5 - 2);
    sum[i] = rounded(slots * x[i], DType::bf16);  // fp32 holds every partial sum
  }
  DeviceBuffer xindex({N, slots}, DType::i32), row_of({N, slots}, DType::i32), token_of({R}, DType::i32);
  DeviceBuffer offsets({2}, DType::i64), xx(x, DType::bf16), y({N, D}, DType::bf16);
  xindex.upload(index);
  const std::unique_ptr<void, void (*)(void*)> memory(cuda::allocate(R * D * 2, "a test"),
                                                      [](void* p) { cuda::release(p); });
  const Tensor rows(memory.get(), {R, D}, DType::bf16, Device::cuda);
  const DispatchPlan plan{row_of, token_of, offsets};
  cuda.run([&](Stream& s) {
    dispatch_plan(s, plan, xindex);
    gather_rows(s, rows, xx, plan);
    sum_rows(s, y, rows, plan);
  });
  expect_close("sum", y, sum, 0.0);
  const std::vector<char> tokens = xx.raw();
  std::vector<char> row(D * 2);
  for (const int64_t r : {int64_t{0}, slots - 1, slots, int64_t{2047}, int64_t{2048}, R - 1}) {
    const int64_t n = D * 2;
    cuda::copy_rows(nullptr, row.data(), n, static_cast<char*>(memory.get()) + r * n, n, n, 1);
    cuda::wait(nullptr);
    EXPECT_EQ(std::memcmp(row.data(), tokens.data() + r / slots * n, row.size()), 0) << "row " << r;
  }
}

}  // namespace
}  // namespace kestrel::test
