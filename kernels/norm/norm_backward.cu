// Backward, with u = w dy sigmoid(g) (w and the gate where there are any):
//
//   dx = r u - x r^3 scale sum(u x)       dg = w dy x r s (1 - s)       dw = sum_rows dy s x r
//
// x, dy (and gate) are read once, dx (and dgate) written once: 3 (5) N D elements, about 10 operations each; bound by
// memory.  A block takes a piece of rows and keeps its part of dw in registers; one partial [D] per piece goes to
// scratch (F32, at most 1584 pieces: it stays in L2), and a second kernel adds the pieces in order.
#include "kernels/core/column_sum.cuh"
#include "kernels/norm/norm_cuda.h"
#include "kernels/norm/norm_rows.cuh"

namespace kestrel::cuda {
namespace {

constexpr int64_t kLeastRows = 8;  // of a piece: what a block of the narrowest group takes at a time

template <class T, class DX>
struct Backward {
  NormShape shape;
  NormRows<DX> dx;
  NormRows<T> dgate, dy, x, gate;
  const float* w;
  const float* rstd;
  float* partial;  // [pieces, D]
  int64_t rows_per_piece;
  bool add;
};

// Adds the G * C * 8 sums of every group of the block in group order and writes them to out [D].
template <int G, int C>
__device__ __forceinline__ void combine_groups(float* out, const float (&dw)[C][kPacket], int D) {
  constexpr int kGroups = kNormThreads / G;
  const int lane = static_cast<int>(threadIdx.x) % G, group = static_cast<int>(threadIdx.x) / G;
  if constexpr (kGroups == 1) {
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const int c = (i * G + lane) * kPacket;
      if (c < D) store(out + c, dw[i]);
    }
  } else {
    __shared__ alignas(16) float sums[G * C * kPacket];
    for (int turn = 0; turn < kGroups; ++turn) {
      if (group == turn) {
#pragma unroll
        for (int i = 0; i < C; ++i) {
          const int c = (i * G + lane) * kPacket;
          if (c >= D) continue;
          float sum[kPacket];
          if (turn > 0) load(sum, sums + c);
#pragma unroll
          for (int j = 0; j < kPacket; ++j) sum[j] = turn > 0 ? sum[j] + dw[i][j] : dw[i][j];
          if (turn + 1 < kGroups) {
            store(sums + c, sum);
          } else {
            store(out + c, sum);
          }
        }
      }
      __syncthreads();
    }
  }
}

template <Norm kind, class T, class DX, int G, int C>
__global__ void __launch_bounds__(kNormThreads, sizeof(T) == 2 ? 3 : 1) group_backward(const Backward<T, DX> a) {
  constexpr int kGroups = kNormThreads / G;
  constexpr bool gated = kind == Norm::gated;
  __shared__ float shared[kNormThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % G, group = static_cast<int>(threadIdx.x) / G, D = a.shape.D;
  const int64_t first = blockIdx.x * a.rows_per_piece;
  const int64_t last = first + a.rows_per_piece < a.shape.rows ? first + a.rows_per_piece : a.shape.rows;
  float dw[C][kPacket] = {};
  // All groups go round equally often: the sum of a row is a matter of whole warps.
  for (int64_t base = first; base < last; base += kGroups) {
    const int64_t r = base + group;
    const bool active = r < last;
    const T* x = a.x.data + (active ? a.shape.at(r, a.x.ld) : 0);
    const T* dy = a.dy.data + (active ? a.shape.at(r, a.dy.ld) : 0);
    const T* gate = gated ? a.gate.data + (active ? a.shape.at(r, a.gate.ld) : 0) : nullptr;
    Packed<T, kPacket> xs[C], ds[C], gs[gated ? C : 1];
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const int c = (i * G + lane) * kPacket;
      if (!active || c >= D) continue;
      xs[i].load(x + c);
      ds[i].load(dy + c);
      if constexpr (gated) gs[i].load(gate + c);
    }
    float rstd = kind != Norm::l2 && active ? a.rstd[r] : 0.f;
    float squares = 0.f, product = 0.f;
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const int c = (i * G + lane) * kPacket;
      if (!active || c >= D) continue;
      float v[kPacket], d[kPacket];
      xs[i].unpack(v);
      ds[i].unpack(d);
      if constexpr (kind == Norm::l2) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) squares += v[j] * v[j];
#pragma unroll
        for (int j = 0; j < kPacket; ++j) product += d[j] * v[j];
      } else {
        float w[kPacket];
        load<kPacket, Cache::constant>(w, a.w + c);
        if constexpr (gated) {
          float g[kPacket];
          gs[i].unpack(g);
#pragma unroll
          for (int j = 0; j < kPacket; ++j) d[j] *= sigmoid(g[j]);
        }
#pragma unroll
        for (int j = 0; j < kPacket; ++j) {
          dw[i][j] += d[j] * (v[j] * rstd);
          product += w[j] * d[j] * v[j];
        }
      }
    }
    if constexpr (kind == Norm::l2) {
      squares = group_sum<G, kNormThreads>(squares, shared);
      rstd = 1.f / sqrtf(squares * a.shape.scale + a.shape.eps);
    }
    product = group_sum<G, kNormThreads>(product, shared);
    if (!active) continue;
    const float k = rstd * rstd * rstd * (product * a.shape.scale);
    DX* dx = a.dx.data + a.shape.at(r, a.dx.ld);
    T* dgate = gated ? a.dgate.data + a.shape.at(r, a.dgate.ld) : nullptr;
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const int c = (i * G + lane) * kPacket;
      if (c >= D) continue;
      float v[kPacket], u[kPacket];
      xs[i].unpack(v);
      ds[i].unpack(u);
      if constexpr (kind != Norm::l2) {
        float w[kPacket];
        load<kPacket, Cache::constant>(w, a.w + c);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) u[j] *= w[j];
      }
      if constexpr (gated) {
        float g[kPacket];
        gs[i].unpack(g);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) {
          const ValueSlope s = sigmoid_slope(g[j]);
          g[j] = u[j] * (v[j] * rstd) * s.slope;
          u[j] *= s.value;
        }
        store(dgate + c, g);
      }
#pragma unroll
      for (int j = 0; j < kPacket; ++j) u[j] = rstd * u[j] - k * v[j];
      if (kind == Norm::rms && a.add) {
        float before[kPacket];
        load(before, dx + c);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) u[j] += before[j];
      }
      store(dx + c, u);
    }
  }
  if constexpr (kind != Norm::l2) combine_groups<G, C>(a.partial + static_cast<int64_t>(blockIdx.x) * D, dw, D);
}

// Each thread owns the columns threadIdx.x + i kLoopThreads, in dx as in the partial sum of dw.
template <Norm kind, class T, class DX>
__global__ void __launch_bounds__(kLoopThreads) loop_backward(const Backward<T, DX> a) {
  constexpr bool gated = kind == Norm::gated;
  __shared__ float shared[kLoopThreads / kWarp];
  const int D = a.shape.D;
  const int64_t first = blockIdx.x * a.rows_per_piece;
  const int64_t last = first + a.rows_per_piece < a.shape.rows ? first + a.rows_per_piece : a.shape.rows;
  float* partial = kind == Norm::l2 ? nullptr : a.partial + static_cast<int64_t>(blockIdx.x) * D;
  for (int64_t r = first; r < last; ++r) {
    const T* x = a.x.data + a.shape.at(r, a.x.ld);
    const T* dy = a.dy.data + a.shape.at(r, a.dy.ld);
    const T* gate = gated ? a.gate.data + a.shape.at(r, a.gate.ld) : nullptr;
    float squares = 0.f, product = 0.f;
    for (int c = static_cast<int>(threadIdx.x); c < D; c += kLoopThreads) {
      const float v = to_float(x[c]);
      float u = to_float(dy[c]);
      if constexpr (gated) u *= sigmoid(to_float(gate[c]));
      if constexpr (kind != Norm::l2) u *= a.w[c];
      squares += v * v;
      product += u * v;
    }
    float rstd;
    if constexpr (kind == Norm::l2) {
      squares = block_sum<kLoopThreads>(squares, shared);
      rstd = 1.f / sqrtf(squares * a.shape.scale + a.shape.eps);
    } else {
      rstd = a.rstd[r];
    }
    product = block_sum<kLoopThreads>(product, shared);
    const float k = rstd * rstd * rstd * (product * a.shape.scale);
    DX* dx = a.dx.data + a.shape.at(r, a.dx.ld);
    T* dgate = gated ? a.dgate.data + a.shape.at(r, a.dgate.ld) : nullptr;
    for (int c = static_cast<int>(threadIdx.x); c < D; c += kLoopThreads) {
      const float v = to_float(x[c]), n = v * rstd;
      float d = to_float(dy[c]), w = 1.f;
      if constexpr (kind != Norm::l2) w = a.w[c];
      if constexpr (gated) {
        const ValueSlope s = sigmoid_slope(to_float(gate[c]));
        dgate[c] = from_float<T>(d * w * n * s.slope);
        d *= s.value;
      }
      if constexpr (kind != Norm::l2) partial[c] = r == first ? d * n : partial[c] + d * n;
      const float before = kind == Norm::rms && a.add ? to_float(dx[c]) : 0.f;
      dx[c] = from_float<DX>(before + (rstd * (w * d) - k * v));
    }
  }
}

template <Norm kind, class T, class DX>
void launch(cudaStream_t stream, const Backward<T, DX>& a, int64_t pieces, bool aligned) {
  const unsigned blocks = static_cast<unsigned>(pieces);
  const bool grouped = aligned && with_group<kind>(a.shape.D, [&](auto group) {
                         constexpr int G = decltype(group)::kThreadsPerRow, C = decltype(group)::kPackets;
                         group_backward<kind, T, DX, G, C><<<blocks, kNormThreads, 0, stream>>>(a);
                       });
  if (!grouped) loop_backward<kind, T, DX><<<blocks, kLoopThreads, 0, stream>>>(a);
  CUDA_CHECK(cudaGetLastError());
}

struct Arguments {
  Tensor dx, dgate, dweight, dy, x, gate, weight, rstd;
  int64_t D;
  float eps;
  bool add;
};

template <Norm kind>
void backward(Stream& s, const Arguments& t) {
  const NormShape shape = norm_shape(kind, t.x, t.D, t.eps);
  const Pieces pieces = pieces_of(shape.rows, kLeastRows);
  ScratchScope scope(s);
  const Tensor partial = kind == Norm::l2 ? Tensor() : s.temp({pieces.count, t.D});
  if (s.planning() || shape.rows == 0) return;
  const bool aligned = all_wide(kPacket, t.dx, t.dgate, t.dy, t.x, t.gate, t.weight) && t.D % kPacket == 0;
  with_activation(t.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto dx_type) {
      using DX = typename decltype(dx_type)::type;
      const Backward<T, DX> a{shape,
                              {data_of<DX>(t.dx), t.dx.ld},
                              {t.dgate ? data_of<T>(t.dgate) : nullptr, t.dgate.ld},
                              {data_of<T>(t.dy), t.dy.ld},
                              {data_of<T>(t.x), t.x.ld},
                              {t.gate ? data_of<T>(t.gate) : nullptr, t.gate.ld},
                              t.weight ? t.weight.f32() : nullptr,
                              t.rstd ? t.rstd.f32() : nullptr,
                              partial ? partial.f32() : nullptr,
                              pieces.rows,
                              t.add};
      launch<kind, T, DX>(cuda_stream(s), a, pieces.count, aligned);
    };
    if constexpr (kind == Norm::rms && !std::is_same_v<T, float>) {
      if (t.dx.dtype == DType::f32) return run(Type<float>{});  // a gradient accumulated in F32
    }
    run(Type<T>{});
  });
  if (kind != Norm::l2) {
    column_sum(cuda_stream(s), partial.f32(), pieces.count, t.D, t.D, AddTo{t.dweight.f32()});
  }
}

}  // namespace

void rms_norm_backward(Stream& s, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight, Tensor rstd,
                       float dx_beta) {
  backward<Norm::rms>(s, {dx, {}, dweight, dy, x, {}, weight, rstd, x.cols(), 0.f, dx_beta == 1.f});
}

void gated_rms_norm_backward(Stream& s, Tensor dx, Tensor dgate, Tensor dweight, Tensor dy, Tensor x, Tensor gate,
                             Tensor weight, Tensor rstd) {
  backward<Norm::gated>(s, {dx, dgate, dweight, dy, x, gate, weight, rstd, weight.numel(), 0.f, false});
}

void l2_norm_backward(Stream& s, Tensor dx, Tensor dy, Tensor x, float eps) {
  backward<Norm::l2>(s, {dx, {}, {}, dy, x, {}, {}, {}, x.cols(), eps, false});
}

}  // namespace kestrel::cuda
