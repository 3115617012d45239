#include <cuda_runtime.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define KESTREL_HAVE_NVTX 1
#endif

#include <array>
#include <atomic>

#include "kernels/core/cuda.h"
#include "kernels/core/device_cuda.h"

namespace kestrel::cuda {
namespace {

const char* hint(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "Lower train.micro_batch_size or data.sequence_length, set train.recompute to \"block\", or free the "
             "device of other programs (nvidia-smi lists them).";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInvalidKernelImage:
      return "This build has no code for this device; configure with -DKESTREL_CUDA_ARCHS set to its architecture.";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return "The driver is missing or older than the CUDA toolkit of this build; update the NVIDIA driver.";
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
      return "Check CUDA_VISIBLE_DEVICES and nvidia-smi.";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
      return "A kernel failed, possibly an earlier one; run again with CUDA_LAUNCH_BLOCKING=1 to learn which, and "
             "please report it with the config.";
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
      return "The device reports a hardware fault; restart from the last checkpoint on another device.";
    default:
      return "Run again with CUDA_LAUNCH_BLOCKING=1 to learn which launch failed.";
  }
}

}  // namespace

void failure(cudaError_t error, const char* statement, const char* file, int line) {
  cudaGetLastError();  // forget it, unless it is sticky
  throw DeviceError(text("CUDA error ", static_cast<int>(error), " (", cudaGetErrorName(error), ": ",
                         cudaGetErrorString(error), ") in ", statement, " at ", file, ":", line, ". ", hint(error)));
}

DeviceCount device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return {count, ""};
  cudaGetLastError();
  if (error == cudaSuccess) return {0, "the driver reports no device; check CUDA_VISIBLE_DEVICES and nvidia-smi"};
  return {0, text(cudaGetErrorString(error), " (", cudaGetErrorName(error), ")")};
}

DeviceProperties device_properties(int index) {
  cudaDeviceProp p;
  CUDA_CHECK(cudaGetDeviceProperties(&p, index));
  int before = 0;
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaGetDevice(&before));
  CUDA_CHECK(cudaSetDevice(index));
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  CUDA_CHECK(cudaSetDevice(before));
  DeviceProperties d;
  d.name = p.name;
  d.major = p.major;
  d.minor = p.minor;
  d.multiprocessors = p.multiProcessorCount;
  d.memory = static_cast<int64_t>(p.totalGlobalMem);
  d.free_memory = static_cast<int64_t>(free_bytes);
  d.l2_cache = p.l2CacheSize;
  d.shared_memory = static_cast<int64_t>(p.sharedMemPerBlockOptin);
  return d;
}

void use_device(int index) {
  CUDA_CHECK(cudaSetDevice(index));
}

int multiprocessors() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0, count = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  std::atomic<int>& slot = known[static_cast<size_t>(device) % known.size()];
  if (const int n = slot.load(std::memory_order_relaxed)) return n;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  slot.store(count, std::memory_order_relaxed);
  return count;
}

void* allocate(int64_t bytes, const char* what) {
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaSuccess) return p;
  cudaGetLastError();
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  throw DeviceError(text("cannot take ", bytes, " bytes of device memory for ", what, ": ", cudaGetErrorString(error),
                         "; the device has ", free_bytes, " bytes free of ", total_bytes, ". ", hint(error)));
}

void release(void* p) noexcept {
  cudaFree(p);
}

void* allocate_pinned(int64_t bytes) {
  void* p = nullptr;
  CUDA_CHECK(cudaMallocHost(&p, static_cast<size_t>(bytes > 0 ? bytes : 1)));
  return p;
}

void release_pinned(void* p) noexcept {
  cudaFreeHost(p);
}

void* create_queue() {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void destroy_queue(void* queue) noexcept {
  cudaStreamDestroy(static_cast<cudaStream_t>(queue));
}

void wait(void* queue) {
  CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(queue)));
}

void* create_event() {
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreate(&event));
  return event;
}

void destroy_event(void* event) noexcept {
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void record_event(void* event, void* queue) {
  CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(queue)));
}

float milliseconds_between(void* first, void* last) {
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(first), static_cast<cudaEvent_t>(last)));
  return ms;
}

void push_range([[maybe_unused]] const char* name) {
#ifdef KESTREL_HAVE_NVTX
  nvtxRangePushA(name);
#endif
}

void pop_range() {
#ifdef KESTREL_HAVE_NVTX
  nvtxRangePop();
#endif
}

void copy_rows(void* queue, void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t row_bytes,
               int64_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(queue);
  const bool dense = rows == 1 || (to_pitch == row_bytes && from_pitch == row_bytes);
  if (dense) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(row_bytes * rows), cudaMemcpyDefault, stream));
    return;
  }
  CUDA_CHECK(cudaMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                               static_cast<size_t>(row_bytes), static_cast<size_t>(rows), cudaMemcpyDefault, stream));
}

}  // namespace kestrel::cuda
