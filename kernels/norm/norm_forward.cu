// Forward: x (and gate) read once, y written once, 2 (3) N D elements and N r's; about 4 operations an element, so
// bound by memory.  A warp keeps up to 8 loads of 16 bytes per thread in flight.
#include "kernels/norm/norm_cuda.h"
#include "kernels/norm/norm_rows.cuh"

namespace kestrel::cuda {
namespace {

template <class T>
struct Forward {
  NormShape shape;
  NormRows<T> y, x, gate;
  const float* w;
  float* rstd;
};

template <Norm kind, class T, int G, int C>
__global__ void __launch_bounds__(kNormThreads) group_forward(const Forward<T> a) {
  __shared__ float shared[kNormThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % G, D = a.shape.D;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kNormThreads / G) + threadIdx.x / G;
  const bool active = r < a.shape.rows;
  const T* x = a.x.data + (active ? a.shape.at(r, a.x.ld) : 0);
  const T* gate = kind == Norm::gated ? a.gate.data + (active ? a.shape.at(r, a.gate.ld) : 0) : nullptr;
  Packed<T, kPacket> row[C], gates[kind == Norm::gated ? C : 1];
#pragma unroll
  for (int i = 0; i < C; ++i) {
    const int c = (i * G + lane) * kPacket;
    if (!active || c >= D) continue;
    row[i].load(x + c);
    if constexpr (kind == Norm::gated) gates[i].load(gate + c);
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < C; ++i) {
    if (!active || (i * G + lane) * kPacket >= D) continue;
    float v[kPacket];
    row[i].unpack(v);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) squares += v[j] * v[j];
  }
  squares = group_sum<G, kNormThreads>(squares, shared);
  if (!active) return;
  const float scale = 1.f / sqrtf(squares * a.shape.scale + a.shape.eps);
  if (kind != Norm::l2 && lane == 0) a.rstd[r] = scale;
  T* y = a.y.data + a.shape.at(r, a.y.ld);
#pragma unroll
  for (int i = 0; i < C; ++i) {
    const int c = (i * G + lane) * kPacket;
    if (c >= D) continue;
    float v[kPacket];
    row[i].unpack(v);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) v[j] *= scale;
    if constexpr (kind != Norm::l2) {
      float w[kPacket];
      load<kPacket, Cache::constant>(w, a.w + c);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v[j] *= w[j];
    }
    if constexpr (kind == Norm::gated) {
      float g[kPacket];
      gates[i].unpack(g);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v[j] *= sigmoid(g[j]);
    }
    store(y + c, v);
  }
}

template <Norm kind, class T>
__global__ void __launch_bounds__(kLoopThreads) loop_forward(const Forward<T> a) {
  __shared__ float shared[kLoopThreads / kWarp];
  const int64_t r = blockIdx.x;
  const T* x = a.x.data + a.shape.at(r, a.x.ld);
  const T* gate = kind == Norm::gated ? a.gate.data + a.shape.at(r, a.gate.ld) : nullptr;
  T* y = a.y.data + a.shape.at(r, a.y.ld);
  float squares = 0.f;
  for (int c = static_cast<int>(threadIdx.x); c < a.shape.D; c += kLoopThreads) {
    const float v = to_float(x[c]);
    squares += v * v;
  }
  squares = block_sum<kLoopThreads>(squares, shared);
  const float scale = 1.f / sqrtf(squares * a.shape.scale + a.shape.eps);
  if (kind != Norm::l2 && threadIdx.x == 0) a.rstd[r] = scale;
  for (int c = static_cast<int>(threadIdx.x); c < a.shape.D; c += kLoopThreads) {
    float v = to_float(x[c]) * scale;
    if constexpr (kind != Norm::l2) v *= a.w[c];
    if constexpr (kind == Norm::gated) v *= sigmoid(to_float(gate[c]));
    y[c] = from_float<T>(v);
  }
}

template <Norm kind, class T>
void launch(cudaStream_t stream, const Forward<T>& a, bool aligned) {
  if (a.shape.rows == 0) return;
  const bool grouped = aligned && with_group<kind>(a.shape.D, [&](auto group) {
                         constexpr int G = decltype(group)::kThreadsPerRow, C = decltype(group)::kPackets;
                         const unsigned blocks = static_cast<unsigned>(divide_up(a.shape.rows, kNormThreads / G));
                         group_forward<kind, T, G, C><<<blocks, kNormThreads, 0, stream>>>(a);
                       });
  if (!grouped) loop_forward<kind, T><<<static_cast<unsigned>(a.shape.rows), kLoopThreads, 0, stream>>>(a);
  CUDA_CHECK(cudaGetLastError());
}

template <Norm kind>
void forward(Stream& s, const Tensor& y, float* rstd, const Tensor& x, const Tensor& gate, const Tensor& weight,
             int64_t D, float eps) {
  const bool aligned = all_wide(kPacket, y, x, gate, weight) && D % kPacket == 0;
  with_activation(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Forward<T> a{norm_shape(kind, x, D, eps),     {data_of<T>(y), y.ld},
                       {data_of<T>(x), x.ld},           {gate ? data_of<T>(gate) : nullptr, gate.ld},
                       weight ? weight.f32() : nullptr, rstd};
    launch<kind, T>(cuda_stream(s), a, aligned);
  });
}

}  // namespace

void rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor weight, float eps) {
  forward<Norm::rms>(s, y, rstd.f32(), x, {}, weight, x.cols(), eps);
}

void gated_rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor gate, Tensor weight, float eps) {
  forward<Norm::gated>(s, y, rstd.f32(), x, gate, weight, weight.numel(), eps);
}

void l2_norm_forward(Stream& s, Tensor y, Tensor x, float eps) {
  forward<Norm::l2>(s, y, nullptr, x, {}, {}, x.cols(), eps);
}

}  // namespace kestrel::cuda
