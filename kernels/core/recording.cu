// CUDA graphs for recording.h.
#include <cuda_runtime.h>

#include "kernels/core/cuda.h"
#include "kernels/core/device_cuda.h"

namespace kestrel::cuda {

void begin_recording(void* queue) {
  // Other threads (the loader's) may go on allocating.
  CUDA_CHECK(cudaStreamBeginCapture(static_cast<cudaStream_t>(queue), cudaStreamCaptureModeThreadLocal));
}

void* end_recording(void* queue) {
  cudaGraph_t graph = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(static_cast<cudaStream_t>(queue), &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  CUDA_CHECK(error);
  return executable;
}

void drop_recording(void* queue) noexcept {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(static_cast<cudaStream_t>(queue), &graph) == cudaSuccess && graph) cudaGraphDestroy(graph);
  cudaGetLastError();  // the failure that ended the recording is already on its way
}

void replay(void* recording, void* queue) {
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording), static_cast<cudaStream_t>(queue)));
}

void destroy_recording(void* recording) noexcept {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(recording));
}

}  // namespace kestrel::cuda
