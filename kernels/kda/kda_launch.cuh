// Launches a kernel whose shared memory is sized at run time.
#pragma once

#include <utility>

#include "kernels/core/cuda.h"

namespace kestrel::cuda {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, int threads, int64_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  kernel<<<blocks, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), stream>>>(
      std::forward<Arguments>(arguments)...);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
