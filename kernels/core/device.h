// Devices of this machine: what there is, and the queue that operations run on.
//
// Everything here may be called in a build without CUDA and on a machine without a GPU: there is then no GPU, and a
// text that says why.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/core/stream.h"

namespace kestrel {

#if KESTREL_BUILT_WITH_CUDA
inline constexpr bool kBuiltWithCuda = true;
#else
inline constexpr bool kBuiltWithCuda = false;
#endif

struct DeviceCount {
  int count = 0;
  std::string reason;  // why count is 0, with the way out; empty otherwise
};
// The CUDA devices this process may use.  Any error of the driver means "none"; never throws.
DeviceCount device_count();

struct DeviceProperties {
  std::string name;           // "NVIDIA H200"
  int major = 0, minor = 0;   // compute capability
  int multiprocessors = 0;    // SM count
  int64_t memory = 0;         // bytes, total
  int64_t free_memory = 0;    // bytes, now
  int64_t l2_cache = 0;       // bytes
  int64_t shared_memory = 0;  // bytes one block may use
};
// Throws DeviceError when there is no such device.
DeviceProperties device_properties(int index);

// Makes device `index` the one that this thread's allocations, streams and launches go to.  Throws DeviceError.
void use_device(int index);

// Owns the queue of a stream.  For the CPU there is none: get() is null and wait() returns at once.
class DeviceQueue {
 public:
  explicit DeviceQueue(Device device);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;
  void* get() const { return queue_; }  // for Stream::queue

 private:
  Device device_;
  void* queue_ = nullptr;
};

// Returns when everything queued on the stream is done; throws DeviceError when some of it failed.  Nothing on the CPU.
void wait(const Stream& s);

}  // namespace kestrel
