// For host code that calls CUDA (*.cu and *_cuda.cpp): checks, and the queue of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/core/stream.h"

namespace kestrel::cuda {

inline cudaStream_t cuda_stream(const Stream& s) {
  return static_cast<cudaStream_t>(s.queue);
}

// Throws DeviceError: the statement, CUDA's words for the error, and what to do about it.
[[noreturn]] void failure(cudaError_t error, const char* statement, const char* file, int line);

// ceil(a / b) for positive b.
constexpr int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Multiprocessors of the current device (asked once per device).  For grid sizes, never for the order of a sum.
int multiprocessors();

}  // namespace kestrel::cuda

// CUDA_CHECK(cudaMemcpyAsync(...)); and after a launch CUDA_CHECK(cudaGetLastError());
#define CUDA_CHECK(...)                                                                                            \
  do {                                                                                                             \
    const cudaError_t kestrel_error_ = (__VA_ARGS__);                                                              \
    if (kestrel_error_ != cudaSuccess) ::kestrel::cuda::failure(kestrel_error_, #__VA_ARGS__, __FILE__, __LINE__); \
  } while (0)
