// Copies between the host and the device of a stream, and host memory made for them.
//
// Both sides have the same dtype, rows and columns; any ld on both.  A copy is queued in the stream's order.  From and
// to pinned memory it runs beside the host, which must not touch that memory before `wait(s)`; from ordinary memory
// CUDA copies to a buffer of its own before upload returns, and download returns when the data is there.  On the CPU
// both are plain copies, done on return.  `DType` mismatches are ContractErrors; failures of the device are
// DeviceErrors.
#pragma once

#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

void upload(Stream& s, Tensor device, const Tensor& host);
void download(Stream& s, Tensor host, const Tensor& device);

// `t` itself when it lies on the host, else a copy of it in `memory`; waits for the stream.
Tensor on_host(Stream& s, Tensor t, std::vector<char>& memory);

// Page-locked host memory, for a stream on `device`; ordinary memory when that is the CPU.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(Device device, int64_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The first elements as a host tensor.
  Tensor tensor(std::initializer_list<int64_t> shape, DType dtype) const;

 private:
  Device device_ = Device::cpu;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace kestrel
