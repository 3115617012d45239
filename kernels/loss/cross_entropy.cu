// Cross entropy of rows of logits and its gradient, in place or not: logits read once from memory (a second time from
// L2: the rows in flight, 2 x 132 of 64 KiB at a vocabulary of 32768 in BF16, fit), gradient written once; two
// exponentials an element.  Bound by memory: 4 bytes an element in BF16.
//
// A block takes a row.  A thread keeps the maximum of its elements and the sum of their exponentials relative to it;
// the block merges the pairs in a fixed order.
#include <limits>

#include "kernels/core/cuda.cuh"
#include "kernels/loss/loss_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 1024, kPacket = 8;

template <int V>
__device__ __forceinline__ float largest_of(const float (&z)[V]) {
  float m = z[0];
#pragma unroll
  for (int i = 1; i < V; ++i) m = fmaxf(m, z[i]);
  return m;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_kernel(float* losses, T* dlogits, int64_t ldd, const T* logits, int64_t ldz, const int32_t* targets,
                         int64_t cols, float grad_scale) {
  __shared__ float shared[kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const T* z = logits + row * ldz;
  T* d = dlogits ? dlogits + row * ldd : nullptr;
  const int32_t target = targets[row];
  const int64_t first = static_cast<int64_t>(threadIdx.x) * V, step = static_cast<int64_t>(kThreads) * V;
  if (target == kIgnoreTarget) {
    const float zeros[V] = {};
    for (int64_t c = first; d && c < cols; c += step) store(d + c, zeros);
    if (threadIdx.x == 0) losses[row] = 0.f;
    return;
  }
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float largest = kNone, sum = 0.f;
#pragma unroll 2
  for (int64_t c = first; c < cols; c += step) {
    float x[V];
    load<V>(x, z + c);
    const float m = fmaxf(largest, largest_of(x));
    const float base = m == kNone ? 0.f : m;
    sum *= exp_fast(largest - base);
#pragma unroll
    for (int i = 0; i < V; ++i) sum += exp_fast(x[i] - base);
    largest = m;
  }
  const bool inside = target >= 0 && target < cols;
  const float z_target = inside ? to_float(z[target]) : std::numeric_limits<float>::quiet_NaN();
  const float m = block_max<kThreads>(largest, shared);
  sum = block_sum<kThreads>(largest == kNone ? 0.f : sum * exp_fast(largest - m), shared);
  // All reads of z[target] lie before the barriers above, all writes after them.
  if (threadIdx.x == 0) losses[row] = logf(sum) + (m - z_target);
  if (!d) return;
  const float factor = inside ? grad_scale / sum : std::numeric_limits<float>::quiet_NaN();
  for (int64_t c = first; c < cols; c += step) {
    float x[V];
    load<V>(x, z + c);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      x[i] = exp_fast(x[i] - m) * factor;
      if (c + i == target) x[i] -= grad_scale;
    }
    store(d + c, x);
  }
}

template <class T, int V>
void launch(cudaStream_t stream, float* losses, const Tensor& dlogits, const Tensor& logits, const int32_t* targets,
            float grad_scale) {
  T* d = dlogits ? data_of<T>(dlogits) : nullptr;
  cross_entropy_kernel<T, V><<<static_cast<unsigned>(logits.rows()), kThreads, 0, stream>>>(
      losses, d, dlogits.ld, data_of<T>(logits), logits.ld, targets, logits.cols(), grad_scale);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void cross_entropy(Stream& s, Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float grad_scale) {
  if (s.planning() || logits.rows() == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  with_activation(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (all_wide(kPacket, dlogits, logits)) {
      launch<T, kPacket>(stream, losses.f32(), dlogits, logits, targets.i32(), grad_scale);
    } else {
      launch<T, 1>(stream, losses.f32(), dlogits, logits, targets.i32(), grad_scale);
    }
  });
}

}  // namespace kestrel::cuda
