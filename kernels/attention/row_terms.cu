// What the backward kernels need of each query: delta = <d_o, o> and log2(e) lse.  Reads o and d_o once, 4 Dv bytes a
// query and head in BF16; bound by memory.  A warp takes one head of one token.
#include "kernels/attention/head_rows.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp, kPacket = 4;

template <class E, int V>
__global__ void __launch_bounds__(kThreads)
    row_terms_kernel(float* delta, float* lse_log2, HeadRows<const E> d_o, HeadRows<const E> o, const float* lse,
                     int64_t pairs, int H, int T) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (pair >= pairs) return;  // whole warps
  const int64_t n = pair / H, h = pair % H, at = (n / T * H + h) * T + n % T;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const E *a = d_o.row(n) + h * d_o.width, *b = o.row(n) + h * o.width;
  float sum = 0.f;
  for (int c = lane * V; c < o.width; c += kWarp * V) {
    float x[V], y[V];
    load<V>(x, a + c);
    load<V>(y, b + c);
#pragma unroll
    for (int i = 0; i < V; ++i) sum = fmaf(x[i], y[i], sum);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  delta[at] = sum;
  lse_log2[at] = lse[at] * kLog2e;
}

template <class E, int V>
void launch(cudaStream_t stream, const AttentionDims& d, float* delta, float* lse_log2, const HeadRows<const E>& d_o,
            const HeadRows<const E>& o, const float* lse) {
  const int64_t pairs = d.B * d.T * d.H;
  row_terms_kernel<E, V><<<grid_of(divide_up(pairs, kWarps)), kThreads, 0, stream>>>(
      delta, lse_log2, d_o, o, lse, pairs, static_cast<int>(d.H), static_cast<int>(d.T));
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void attention_row_terms(Stream& s, const AttentionDims& d, Tensor delta, Tensor lse_log2, Tensor d_o, Tensor o,
                         Tensor lse) {
  with_activation(o.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    const HeadRows<const E> a(d_o, d.Dv), b(o, d.Dv);
    if (a.wide && b.wide) {
      launch<E, kPacket>(cuda_stream(s), d, delta.f32(), lse_log2.f32(), a, b, lse.f32());
    } else {
      launch<E, 1>(cuda_stream(s), d, delta.f32(), lse_log2.f32(), a, b, lse.f32());
    }
  });
}

}  // namespace kestrel::cuda
