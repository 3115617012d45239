// Devices and transfers as they are on any machine, with or without a GPU, in a build with or without CUDA.
#include "kernels/core/device.h"

#include <utility>

#include "kernels/core/transfer.h"
#include "tests/support.h"

namespace kestrel::test {
namespace {

TEST(Device, CountNeverThrowsAndGivesAReasonForNone) {
  const DeviceCount n = device_count();
  EXPECT_GE(n.count, 0);
  EXPECT_EQ(n.count == 0, !n.reason.empty()) << n.reason;
  if (!kBuiltWithCuda) {
    EXPECT_EQ(n.count, 0);
  }
}

TEST(Device, OneThatIsNotThereIsADeviceError) {
  EXPECT_THROW(device_properties(10000), DeviceError);
  EXPECT_THROW(use_device(10000), DeviceError);
}

TEST(Device, TheCpuHasNoQueueAndNothingToWaitFor) {
  const DeviceQueue queue(Device::cpu);
  EXPECT_EQ(queue.get(), nullptr);
  CpuStream s;
  EXPECT_NO_THROW(wait(s));
}

TEST(Transfer, IsACopyOnTheCpu) {
  CpuStream s;
  Buffer a({3, 5}), b({3, 7}), c({3, 5});
  a.normal(1);
  const Tensor block = b->columns(1, 5);
  upload(s, block, a);
  download(s, c, block);
  for (int64_t i = 0; i < 15; ++i) EXPECT_EQ(c[i], a[i]);
  EXPECT_TRUE(std::isnan(b[0]) && std::isnan(b[6]));  // beside the block nothing is written
  EXPECT_THROW(upload(s, block, b), ContractError);
  Buffer counts({3, 5}, DType::i32);
  EXPECT_THROW(upload(s, a, counts), ContractError);
}

TEST(Transfer, APinnedBufferIsOrdinaryMemoryOnTheCpu) {
  PinnedBuffer a(Device::cpu, 40);
  const Tensor t = a.tensor({2, 5}, DType::f32);
  t.f32()[9] = 3.f;
  EXPECT_THROW(a.tensor({2, 6}, DType::f32), ContractError);
  PinnedBuffer b = std::move(a);
  EXPECT_EQ(b.tensor({10}, DType::f32).f32()[9], 3.f);
  EXPECT_EQ(b.bytes(), 40);
  EXPECT_EQ(PinnedBuffer().data(), nullptr);
}

}  // namespace
}  // namespace kestrel::test
