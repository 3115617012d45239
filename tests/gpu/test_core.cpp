// Devices, transfers and the plain element-wise operations on the GPU.
#include <random>

#include "gpu/support.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/transfer.h"

namespace kestrel::test {
namespace {

constexpr DType kActivations[] = {DType::f32, DType::bf16};

TEST(GpuCore, TheDeviceDescribesItself) {
  const DeviceCount n = device_count();
  ASSERT_GE(n.count, 1) << n.reason;
  EXPECT_TRUE(n.reason.empty());
  const DeviceProperties p = device_properties(0);
  EXPECT_FALSE(p.name.empty());
  EXPECT_GT(p.multiprocessors, 0);
  EXPECT_GT(p.memory, int64_t{1} << 30);
  EXPECT_LE(p.free_memory, p.memory);
  EXPECT_GT(p.l2_cache, 0);
  EXPECT_GE(p.shared_memory, 48 * 1024);
}

TEST(GpuCore, ADeviceThatDoesNotExistIsADeviceError) {
  EXPECT_THROW(use_device(10000), DeviceError);
  EXPECT_THROW(device_properties(10000), DeviceError);
  use_device(0);  // the error is not sticky
}

TEST(GpuCore, AnArenaLargerThanTheDeviceIsADeviceError) {
  EXPECT_THROW(Arena(Device::cuda, int64_t{1} << 50), DeviceError);
}

TEST(GpuCore, TransfersRoundTripBetweenAnyLeadingDimensions) {
  CudaStream cuda;
  for (const int64_t pad : {0, 3}) {
    Buffer in({7, 5}), out({7, 9});
    in.normal(1);
    DeviceBuffer d({7, 5}, DType::f32, pad, pad);
    const Tensor block = out->columns(2, 5);
    cuda.run([&](Stream& s) {
      upload(s, d, in);
      download(s, block, d);
      wait(s);
    });
    for (int64_t r = 0; r < 7; ++r)
      for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(block.f32()[r * block.ld + c], in[r * 5 + c]);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[8]));  // the columns beside the block keep their poison
  }
}

TEST(GpuCore, PinnedMemoryCarriesATransfer) {
  CudaStream cuda;
  PinnedBuffer pinned(Device::cuda, 4000);
  const Tensor host = pinned.tensor({10, 100}, DType::f32);
  for (int64_t i = 0; i < 1000; ++i) host.f32()[i] = static_cast<float>(i);
  DeviceBuffer d({10, 100});
  cuda.run([&](Stream& s) { upload(s, d, host); });
  expect_close("device copy", d, host, 0.);
  EXPECT_THROW(pinned.tensor({11, 100}, DType::f32), ContractError);
}

struct Layout {
  int64_t rows, cols, left, right;
};
// Wide and narrow paths: whole vectors, ragged widths, aligned and unaligned column blocks, more than one block.
constexpr Layout kLayouts[] = {{1, 1, 0, 0}, {3, 7, 0, 0},     {5, 64, 0, 0},     {9, 64, 8, 8},   {9, 64, 1, 2},
                               {0, 8, 0, 0}, {301, 136, 0, 0}, {301, 136, 16, 8}, {257, 131, 3, 0}};

TEST(GpuCore, FillZeroClearsTheTensorAndNothingElse) {
  CudaStream cuda;
  for (const DType t : {DType::f32, DType::bf16, DType::i32}) {
    for (const Layout& l : kLayouts) {
      DeviceBuffer d({l.rows, l.cols}, t, l.left, l.right);
      cuda.run([&](Stream& s) { fill_zero(s, d); });
      for (const float x : d.values()) ASSERT_EQ(x, 0.f) << d->describe();
    }
  }
}

TEST(GpuCore, CopyCastRoundsToNearestEven) {
  CudaStream cuda;
  for (const DType from : kActivations) {
    for (const DType to : kActivations) {
      for (const Layout& l : kLayouts) {
        Buffer x({l.rows, l.cols});
        x.normal(2);
        if (x->numel() > 2) {
          x[0] = 1.00390625f;  // halfway between two bf16 numbers: to even, 1
          x[1] = 1.01171875f;  // halfway: to even, 1.015625
        }
        DeviceBuffer in(x, from, l.left, l.right), out({l.rows, l.cols}, to, l.right, l.left);
        round_to(from, x);
        round_to(to, x);
        cuda.run([&](Stream& s) { copy_cast(s, out, in); });
        expect_close("copy", out, x, 0.);  // host and device round alike, so the bits agree
      }
    }
  }
}

TEST(GpuCore, AddIntoAddsScaledFloatsAndCounts) {
  CudaStream cuda;
  for (const Layout& l : kLayouts) {
    Buffer a({l.rows, l.cols}), b({l.rows, l.cols});
    a.normal(3);
    b.normal(4);
    DeviceBuffer da(a, DType::f32, l.left, l.right), db(b, DType::f32, l.right, l.left);
    cuda.run([&](Stream& s) { add_into(s, da, db, -0.37f); });
    for (int64_t i = 0; i < a->numel(); ++i) a[i] += -0.37f * b[i];
    expect_close("sum", da, a, 1e-6);  // one fused or unfused multiply-add: an ulp

    Buffer m({l.rows, l.cols}, DType::i32), n({l.rows, l.cols}, DType::i32);
    std::vector<int32_t> want;
    for (int64_t i = 0; i < m->numel(); ++i) {
      m->i32()[i] = static_cast<int32_t>(i % 1000);
      n->i32()[i] = static_cast<int32_t>(i % 77);
      want.push_back(m->i32()[i] + n->i32()[i]);
    }
    DeviceBuffer dm(m, DType::i32, l.left, l.right), dn(n, DType::i32, l.right, l.left);
    cuda.run([&](Stream& s) { add_into(s, dm, dn); });
    expect_equal("counts", dm, want);
  }
}

TEST(GpuCore, DocumentStartsFollowTheSegments) {
  CudaStream cuda;
  CpuStream cpu;
  std::mt19937 rng(5);
  for (const int64_t T : {1, 2, 31, 255, 256, 257, 1000, 4096}) {
    Buffer segment({3, T}, DType::i32), want({3, T}, DType::i32);
    for (int64_t b = 0; b < 3; ++b) {
      int32_t id = 7;
      for (int64_t t = 0; t < T; ++t) {
        if (rng() % (b == 0 ? 3u : b == 1 ? 200u : 1000000u) == 0) id ^= static_cast<int32_t>(rng() % 5);
        segment->i32()[b * T + t] = id;
      }
    }
    document_starts(cpu, want, segment);
    DeviceBuffer in(segment, DType::i32), out({3, T}, DType::i32);
    cuda.run([&](Stream& s) { document_starts(s, out, in); });
    expect_equal("document_start", out, {want->i32(), want->i32() + want->numel()});
  }
}

}  // namespace
}  // namespace kestrel::test
