// 28 bytes moved per parameter (p, m, v read and written, g read), about 40 instructions: bound by memory.
#include <cmath>

#include "kernels/core/pointwise.cuh"
#include "kernels/optimizer/optimizer_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kUnroll = 2;  // 8 accesses of 16 bytes in flight per thread

template <int V>
struct Step {
  float *p, *m, *v;
  const float* g;
  float lr, beta1, beta2, eps, decay, grad_scale;
  float correct_m, correct_v;  // 1 / (1 - beta^t)

  struct Loaded {
    Packed<float, V> p, g, m, v;
  };
  __device__ Loaded load(int64_t, int64_t i) const {
    Loaded l;
    l.g.template load<Cache::once>(g + i);
    l.m.template load<Cache::once>(m + i);
    l.v.template load<Cache::once>(v + i);
    l.p.load(p + i);
    return l;
  }
  __device__ void finish(int64_t, int64_t i, const Loaded& l) const {
    float x[V], grad[V], first[V], second[V];
    l.p.unpack(x);
    l.g.unpack(grad);
    l.m.unpack(first);
    l.v.unpack(second);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float d = grad_scale * grad[k];
      first[k] = beta1 * first[k] + (1.f - beta1) * d;
      second[k] = beta2 * second[k] + (1.f - beta2) * d * d;
      x[k] -= lr * (first[k] * correct_m / (sqrtf(second[k] * correct_v) + eps) + decay * x[k]);
    }
    store<V, Cache::once>(m + i, first);
    store<V, Cache::once>(v + i, second);
    store(p + i, x);
  }
};

float bias_correction(float beta, int64_t t) {
  return static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(t))));
}

}  // namespace

void adamw_step(Stream& s, const AdamW& h, Tensor p, Tensor g, Tensor m, Tensor v, float grad_scale) {
  const cudaStream_t stream = cuda_stream(s);
  const Extent e{1, p.numel()};
  const auto launch = [&](auto width) {
    constexpr int V = decltype(width)::value;
    pointwise<V, kUnroll>(stream, e,
                          Step<V>{p.f32(), m.f32(), v.f32(), g.f32(), h.lr, h.beta1, h.beta2, h.eps, h.weight_decay,
                                  grad_scale, bias_correction(h.beta1, h.t), bias_correction(h.beta2, h.t)});
  };
  if (wide_extent(4, e, p, g, m, v)) return launch(std::integral_constant<int, 4>{});
  launch(std::integral_constant<int, 1>{});
}

}  // namespace kestrel::cuda
