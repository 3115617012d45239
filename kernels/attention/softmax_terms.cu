// cuDNN gives either log-sum-exp or the largest score of each query; where both are wanted it gives the largest and the
// sum, and this makes the rest of them: 12 bytes a query.  A block takes 1024 queries of one head.
#include <limits>

#include "kernels/attention/attention_cudnn.h"
#include "kernels/attention/head_rows.cuh"

namespace kestrel::cuda::cudnn {
namespace {

constexpr int kThreads = 256, kQueries = 1024;

__global__ void __launch_bounds__(kThreads)
    softmax_terms_kernel(float* lse, const float* sum_exp, float* max_logit, int H, int T, int pieces) {
  __shared__ float shared[kThreads / kWarp];
  const int64_t head = blockIdx.x / pieces;
  const int first = static_cast<int>(blockIdx.x % pieces) * kQueries, end = min(first + kQueries, T);
  float highest = -std::numeric_limits<float>::infinity();
  for (int i = first + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const float largest = lse[head * T + i];
    highest = fmaxf(highest, largest);
    lse[head * T + i] = largest + logf(sum_exp[head * T + i]);
  }
  highest = block_max<kThreads>(highest, shared);
  if (threadIdx.x == 0) raise_to(max_logit + head % H, highest);
}

}  // namespace

void merge_softmax_terms(Stream& s, const AttentionDims& d, Tensor lse, Tensor sum_exp, Tensor max_logit) {
  const int pieces = static_cast<int>(divide_up(d.T, kQueries));
  softmax_terms_kernel<<<grid_of(d.B * d.H * pieces), kThreads, 0, cuda_stream(s)>>>(
      lse.f32(), sum_exp.f32(), max_logit.f32(), static_cast<int>(d.H), static_cast<int>(d.T), pieces);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda::cudnn
