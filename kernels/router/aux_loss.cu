// The auxiliary loss: a block takes 64 tokens, a warp eight of them in order; sums of blocks are added in order.
#include "kernels/router/router.cuh"
#include "kernels/router/router_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kWarps = 8;

__global__ void count_valid_kernel(int32_t* counted, const uint8_t* valid, int64_t N) {
  int mine = 0;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) mine += valid[n] != 0;
  mine = warp_sum(mine);
  __shared__ int warps[kWarp];
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int sum = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) sum += warps[w];
  *counted = sum;
}

// p_e = s_e / S;   d(sum_e f_e p_e)/ds_j = (f_j - sum_e f_e p_e) / S
__global__ void aux_kernel(float* partial, float* dlogits, int64_t dlogits_ld, const float* logits, int64_t logits_ld,
                           const int32_t* load, const uint8_t* valid, const int32_t* counted, int64_t N, int E,
                           int64_t k, float coefficient, float scale) {
  const int64_t tokens = valid == nullptr ? N : *counted;
  const float per_token = tokens > 0 ? coefficient * static_cast<float>(E) / static_cast<float>(tokens) : 0.f;
  const float f_scale = tokens > 0 ? 1.f / (static_cast<float>(tokens) * static_cast<float>(k)) : 0.f;
  float mine = 0.f;
  for (int i = 0; i < kAuxRows / kWarps; ++i) {
    const int64_t n = blockIdx.x * kAuxRows + threadIdx.y * (kAuxRows / kWarps) + i;
    if (n >= N || (valid != nullptr && valid[n] == 0)) continue;
    const float* z = logits + n * logits_ld;
    float sum = 0.f, weighted = 0.f;
    for (int e = threadIdx.x; e < E; e += kWarp) {
      const float s = router_score(z[e]);
      sum += s;
      weighted += static_cast<float>(load[e]) * s;
    }
    sum = warp_sum(sum) + kTinySum;
    const float value = f_scale * warp_sum(weighted) / sum;
    const float factor = scale * per_token / sum;
    float* dz = dlogits + n * dlogits_ld;
    for (int e = threadIdx.x; e < E; e += kWarp) {
      const float s = router_score(z[e]);
      dz[e] += factor * (f_scale * static_cast<float>(load[e]) - value) * s * (1.f - s);
    }
    mine += value;
  }
  __shared__ float warps[kWarps];
  if (threadIdx.x == 0) warps[threadIdx.y] = mine;
  __syncthreads();
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  float sum = 0.f;
  for (int w = 0; w < kWarps; ++w) sum += warps[w];
  partial[blockIdx.x] = sum * per_token;
}

// Thread t adds pieces t, t + 256, ...; then the threads' sums in order.
__global__ void sum_kernel(float* loss, const float* partial, int64_t pieces) {
  constexpr int kThreads = 256;
  __shared__ double sums[kThreads];
  double mine = 0;
  for (int64_t p = threadIdx.x; p < pieces; p += kThreads) mine += partial[p];
  sums[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int t = 0; t < kThreads; ++t) total += sums[t];
  loss[0] += static_cast<float>(total);
}

}  // namespace

void aux_loss(Stream& s, float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits, Tensor load,
              int64_t k, Tensor valid, Tensor partial, Tensor counted) {
  const int64_t N = logits.rows();
  if (N == 0) return;
  const uint8_t* mask = valid ? valid.as<uint8_t>() : nullptr;
  const cudaStream_t stream = cuda_stream(s);
  if (mask != nullptr) {
    count_valid_kernel<<<1, 1024, 0, stream>>>(counted.i32(), mask, N);
    CUDA_CHECK(cudaGetLastError());
  }
  aux_kernel<<<static_cast<unsigned>(partial.numel()), dim3(kWarp, kWarps), 0, stream>>>(
      partial.f32(), dlogits.f32(), dlogits.ld, logits.f32(), logits.ld, load.i32(), mask, counted.i32(), N,
      static_cast<int>(logits.cols()), k, coefficient, scale);
  CUDA_CHECK(cudaGetLastError());
  sum_kernel<<<1, 256, 0, stream>>>(loss.f32(), partial.f32(), partial.numel());
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
