// Gradient of the routing weights: G lanes per token clear its row, then write the chosen entries.
#include "kernels/router/router.cuh"
#include "kernels/router/router_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;

// Lane j of the group has slots j, j + G, ...: of the sums each lane adds its own, then the lanes in a butterfly.
template <int G, int V>
__global__ void __launch_bounds__(kThreads)
    route_backward_kernel(float* dlogits, int64_t dlogits_ld, const float* dweight, int64_t dweight_ld,
                          const int32_t* index, int64_t index_ld, const float* score, int64_t score_ld, int64_t N,
                          int E, int slots, bool renormalize, float scaling) {
  const int64_t n = int64_t{blockIdx.x} * (kThreads / G) + threadIdx.x / G;
  const int part = threadIdx.x % G;
  const bool exists = n < N;
  float* dz = dlogits + n * dlogits_ld;
  const int32_t* id = index + n * index_ld;
  const float *s = score + n * score_ld, *dw = dweight + n * dweight_ld;
  float sum = 0.f, dot = 0.f;
  if (exists) {
    const float zero[V] = {};
    for (int e = part * V; e < E; e += G * V) store<V>(dz + e, zero);
    for (int j = part; j < slots; j += G) {
      if (id[j] < 0) continue;
      sum += s[j];
      dot += dw[j] * s[j];
    }
  }
  sum = group_sum<G, kThreads>(sum, nullptr) + kTinySum;
  dot = group_sum<G, kThreads>(dot, nullptr);
  const float mean = renormalize ? dot / sum : 0.f;
  const float factor = renormalize ? scaling / sum : scaling;
  __syncwarp();  // the zeros of the other lanes come first
  if (!exists) return;
  for (int j = part; j < slots; j += G) {
    if (id[j] >= 0) dz[id[j]] = factor * (dw[j] - mean) * s[j] * (1.f - s[j]);
  }
}

template <int G, int V>
void launch(Stream& s, const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score) {
  const int64_t N = dlogits.rows();
  route_backward_kernel<G, V><<<static_cast<unsigned>(divide_up(N, kThreads / G)), kThreads, 0, cuda_stream(s)>>>(
      dlogits.f32(), dlogits.ld, dweight.f32(), dweight.ld, index.i32(), index.ld, score.f32(), score.ld, N,
      static_cast<int>(r.experts), static_cast<int>(r.slots), r.renormalize, r.scaling);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void route_backward(Stream& s, const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score) {
  if (dlogits.rows() == 0) return;
  const bool aligned = wide(dlogits, 4), few = r.experts <= 128 && r.slots <= 16;
  if (few && aligned) return launch<8, 4>(s, r, dlogits, dweight, index, score);
  if (few) return launch<8, 1>(s, r, dlogits, dweight, index, score);
  if (aligned) return launch<kWarp, 4>(s, r, dlogits, dweight, index, score);
  launch<kWarp, 1>(s, r, dlogits, dweight, index, score);
}

}  // namespace kestrel::cuda
