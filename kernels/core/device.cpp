#include "kernels/core/device.h"

#include "kernels/core/device_cuda.h"

namespace kestrel {
namespace {

constexpr const char* kNotBuilt =
    "this build has no CUDA back end; configure with -DKESTREL_CUDA=ON on a machine with the CUDA toolkit";

}  // namespace

DeviceCount device_count() {
  if constexpr (kBuiltWithCuda) return cuda::device_count();
  return {0, kNotBuilt};
}

DeviceProperties device_properties(int index) {
  if constexpr (kBuiltWithCuda) return cuda::device_properties(index);
  throw DeviceError(text("there is no CUDA device ", index, ": ", kNotBuilt, "."));
}

void use_device(int index) {
  if constexpr (kBuiltWithCuda) return cuda::use_device(index);
  throw DeviceError(text("cannot use CUDA device ", index, ": ", kNotBuilt, "."));
}

DeviceQueue::DeviceQueue(Device device) : device_(device) {
  if (device == Device::cpu) return;
  if constexpr (kBuiltWithCuda) {
    queue_ = cuda::create_queue();
    return;
  }
  throw DeviceError(text("cannot make a CUDA queue: ", kNotBuilt, "."));
}

DeviceQueue::~DeviceQueue() {
  if constexpr (kBuiltWithCuda) {
    if (device_ == Device::cuda) cuda::destroy_queue(queue_);
  }
}

void wait(const Stream& s) {
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda && !s.planning()) cuda::wait(s.queue);
  }
}

}  // namespace kestrel
