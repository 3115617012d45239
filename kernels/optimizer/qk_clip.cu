// 8 bytes per element of the heads that are clipped, which are few.  A block takes a row of w_q, or a nope row of w_kv.
#include "kernels/core/cuda.cuh"
#include "kernels/optimizer/optimizer_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;

struct Weights {
  float *q, *kv;
  int64_t q_ld, kv_ld, q_cols, kv_cols;
  int64_t H, nope, rope, v;
};

template <int V>
__global__ void __launch_bounds__(kThreads) qk_clip_kernel(Weights w, const float* s_max, float tau) {
  const int64_t q_rows = w.nope + w.rope, block = blockIdx.x;
  const bool of_q = block < w.H * q_rows;
  const int64_t at = of_q ? block : block - w.H * q_rows, rows = of_q ? q_rows : w.nope;
  const int64_t head = at / rows, r = at % rows;
  const float most = s_max[head];
  // No logit above tau, or no number at all: leave the head alone.
  if (!(most > tau && most < __int_as_float(0x7f800000))) return;
  const float gamma = tau / most, factor = r < w.nope ? sqrtf(gamma) : gamma;
  float* row = of_q ? w.q + at * w.q_ld : w.kv + (head * (w.nope + w.v) + r) * w.kv_ld;
  const int64_t cols = of_q ? w.q_cols : w.kv_cols;
  for (int64_t c = int64_t{threadIdx.x} * V; c < cols; c += kThreads * V) {
    float x[V];
    load(x, row + c);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] *= factor;
    store(row + c, x);
  }
}

}  // namespace

void qk_clip(Stream& s, Tensor w_q, Tensor w_kv, Tensor s_max, float tau, int64_t nope, int64_t rope, int64_t v) {
  const int64_t H = s_max.numel(), blocks = H * (nope + rope + nope);
  if (blocks == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  const Weights w{w_q.f32(), w_kv.f32(), w_q.ld, w_kv.ld, w_q.cols(), w_kv.cols(), H, nope, rope, v};
  if (all_wide(4, w_q, w_kv)) {
    qk_clip_kernel<4><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(w, s_max.f32(), tau);
  } else {
    qk_clip_kernel<1><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(w, s_max.f32(), tau);
  }
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
