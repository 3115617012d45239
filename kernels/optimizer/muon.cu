// The Muon step.  Per parameter: 12 bytes for momentum and norm (g, m read, m written), 8 + the element for the
// normalised copy (u is formed again instead of stored), 10 or 12 for the update; bound by memory.  Between them
// Newton-Schulz, 4 m^2 n + 2 m^3 FLOP per step and matrix of short side m in tensor cores, bound by those for long
// matrices.
//
// Matrices lie as they are in memory: a tall one has its Gram matrix formed on the columns, X^T X, and is multiplied
// from the right.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/core/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/optimizer/optimizer_cuda.h"
#include "kernels/optimizer/quintic.h"
#include "kernels/optimizer/sums.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPackets = 4;                                         // in flight per thread
constexpr int64_t kPiece = int64_t{kThreads} * kPacket * kPackets;  // elements of a matrix that a block takes
constexpr int64_t kScratch = int64_t{256} << 20;                    // bytes, unless one matrix needs more
constexpr int64_t kRounding = 4096;                                 // of which for the alignment of its six tensors

// How a call is cut: `group` matrices at a time.  A function of the shape alone.
struct Plan {
  int64_t count, rows, cols, n, side;  // n = rows cols; side is the shorter
  int64_t pieces;                      // per matrix
  int64_t group;
  DType dtype;

  Plan(const Tensor& t, DType type)
      : count(t.dim(0)),
        rows(t.dim(1)),
        cols(t.dim(2)),
        n(rows * cols),
        side(std::min(rows, cols)),
        pieces(divide_up(n, kPiece)),
        dtype(type) {
    const int64_t bytes = 2 * (n + side * side) * size_of(dtype) + (pieces + 1) * size_of(DType::f64);
    group = std::clamp<int64_t>((kScratch - kRounding) / bytes, 1, count);
    KESTREL_CHECK(group * pieces <= INT32_MAX, "a Muon block of ", rows, " x ", cols);
  }
};

struct Workspace {
  Tensor x, y;              // [group, rows, cols]
  Tensor a, b;              // [group, side, side]
  Tensor partial, inverse;  // F64 [group, pieces], [group]

  Workspace(Stream& s, const Plan& p)
      : x(s.temp({p.group, p.rows, p.cols}, p.dtype)),
        y(s.temp({p.group, p.rows, p.cols}, p.dtype)),
        a(s.temp({p.group, p.side, p.side}, p.dtype)),
        b(s.temp({p.group, p.side, p.side}, p.dtype)),
        partial(s.temp({p.group, p.pieces}, DType::f64)),
        inverse(s.temp({p.group}, DType::f64)) {}
};

// A packet of a matrix: matrix i of the group, elements from `at` on, `left` to the matrix's end.
struct Place {
  int64_t i, at, left;
};

// ---------------------------------------------------------------- what is orthogonalised

// A matrix as it is given.
template <bool wide>
struct Given {
  const float* x;
  int64_t stride;
  struct Loaded {
    float x[kPacket];
  };
  Given from(int64_t first) const { return {x + first * stride, stride}; }
  __device__ __forceinline__ Loaded load(const Place& p) const {
    Loaded l;
    load_packet(l.x, x + p.i * stride + p.at, p.left, wide);
    return l;
  }
  __device__ __forceinline__ void advance(const Place&, const Loaded& l, float (&u)[kPacket]) const { again(l, u); }
  __device__ __forceinline__ void again(const Loaded& l, float (&u)[kPacket]) const {
#pragma unroll
    for (int j = 0; j < kPacket; ++j) u[j] = l.x[j];
  }
};

// m = mu m + g;  u = nesterov ? g + mu m : m.  `advance` writes m, `again` finds it written; roundings are spelled out,
// so that both give the same u.
template <bool wide>
struct Momentum {
  const float* g;
  float* m;
  int64_t stride;
  float grad_scale, mu;
  bool nesterov;
  struct Loaded {
    float g[kPacket], m[kPacket];
  };
  Momentum from(int64_t first) const {
    return {g + first * stride, m + first * stride, stride, grad_scale, mu, nesterov};
  }
  __device__ __forceinline__ Loaded load(const Place& p) const {
    Loaded l;
    load_packet(l.g, g + p.i * stride + p.at, p.left, wide);
    load_packet(l.m, m + p.i * stride + p.at, p.left, wide);
    return l;
  }
  __device__ __forceinline__ void advance(const Place& p, Loaded l, float (&u)[kPacket]) const {
#pragma unroll
    for (int j = 0; j < kPacket; ++j) l.m[j] = __fmaf_rn(mu, l.m[j], __fmul_rn(grad_scale, l.g[j]));
    store_packet(m + p.i * stride + p.at, l.m, p.left, wide);
    again(l, u);
  }
  __device__ __forceinline__ void again(const Loaded& l, float (&u)[kPacket]) const {
#pragma unroll
    for (int j = 0; j < kPacket; ++j) {
      u[j] = nesterov ? __fmaf_rn(mu, l.m[j], __fmul_rn(grad_scale, l.g[j])) : l.m[j];
    }
  }
};

// ---------------------------------------------------------------- what becomes of it

// x = NS(u)
template <bool wide>
struct Write {
  float* x;
  int64_t stride;
  struct Loaded {};
  Write from(int64_t first) const { return {x + first * stride, stride}; }
  __device__ __forceinline__ Loaded load(const Place&) const { return {}; }
  __device__ __forceinline__ void finish(const Place& p, const Loaded&, const float (&o)[kPacket]) const {
    store_packet(x + p.i * stride + p.at, o, p.left, wide);
  }
};

// p -= lr (scale NS(u) + decay p)
template <bool wide>
struct Update {
  float* p;
  int64_t stride;
  float lr, scale, decay;
  struct Loaded {
    float p[kPacket];
  };
  Update from(int64_t first) const { return {p + first * stride, stride, lr, scale, decay}; }
  __device__ __forceinline__ Loaded load(const Place& at) const {
    Loaded l;
    load_packet(l.p, p + at.i * stride + at.at, at.left, wide);
    return l;
  }
  __device__ __forceinline__ void finish(const Place& at, Loaded l, const float (&o)[kPacket]) const {
#pragma unroll
    for (int j = 0; j < kPacket; ++j) l.p[j] -= lr * (scale * o[j] + decay * l.p[j]);
    store_packet(p + at.i * stride + at.at, l.p, at.left, wide);
  }
};

// ---------------------------------------------------------------- kernels

// f(k, place) for the packets of this block's piece.
template <class F>
__device__ __forceinline__ void for_each_packet(int64_t n, int64_t pieces, F&& f) {
  const int64_t i = blockIdx.x / pieces, first = (blockIdx.x - i * pieces) * kPiece + threadIdx.x * kPacket;
#pragma unroll
  for (int k = 0; k < kPackets; ++k) {
    const int64_t at = first + k * (kThreads * kPacket);
    if (at < n) f(k, Place{i, at, n - at});
  }
}

// partial[i, piece] = sum of u^2, in fp64.
template <class Source>
__global__ void __launch_bounds__(kThreads)
    partial_norms_kernel(Source source, int64_t n, int64_t pieces, double* partial) {
  __shared__ double warps[kThreads / kWarp];
  typename Source::Loaded loaded[kPackets];
  for_each_packet(n, pieces, [&](int k, const Place& p) { loaded[k] = source.load(p); });
  double sum = 0;
  for_each_packet(n, pieces, [&](int k, const Place& p) {
    float u[kPacket];
    source.advance(p, loaded[k], u);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) sum += static_cast<double>(u[j]) * static_cast<double>(u[j]);
  });
  sum = block_sum<kThreads>(sum, warps);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) norms_kernel(const double* partial, int64_t pieces, double* inverse) {
  __shared__ double warps[kThreads / kWarp];
  const double sum = sum_of_pieces<kThreads>(partial + blockIdx.x * pieces, pieces, warps);
  if (threadIdx.x == 0) inverse[blockIdx.x] = 1.0 / (sqrt(sum) + kNormEps);
}

// x = u / (|u| + eps), dense.
template <bool wide, class T, class Source>
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(T* x, Source source, int64_t n, int64_t pieces, const double* inverse) {
  typename Source::Loaded loaded[kPackets];
  for_each_packet(n, pieces, [&](int k, const Place& p) { loaded[k] = source.load(p); });
  const double factor = inverse[blockIdx.x / pieces];
  for_each_packet(n, pieces, [&](int k, const Place& p) {
    float u[kPacket];
    source.again(loaded[k], u);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) u[j] = static_cast<float>(u[j] * factor);
    store_packet(x + p.i * n + p.at, u, p.left, wide);
  });
}

template <bool wide, class T, class Result>
__global__ void __launch_bounds__(kThreads) finish_kernel(Result result, const T* x, int64_t n, int64_t pieces) {
  typename Result::Loaded loaded[kPackets];
  float o[kPackets][kPacket];
  for_each_packet(n, pieces, [&](int k, const Place& p) {
    loaded[k] = result.load(p);
    load_packet(o[k], x + p.i * n + p.at, p.left, wide);
  });
  for_each_packet(n, pieces, [&](int k, const Place& p) { result.finish(p, loaded[k], o[k]); });
}

// ---------------------------------------------------------------- the order of things

// Newton-Schulz of the first `count` matrices of w.x, which are normalised.  Gives the place of the result.
Tensor iterate(Stream& s, const Plan& plan, const Workspace& w, int64_t count, int steps) {
  const bool tall = plan.rows > plan.cols;
  const Tensor a = w.a.slice(0, count), b = w.b.slice(0, count);
  Tensor x = w.x.slice(0, count), y = w.y.slice(0, count);
  for (int step = 0; step < steps; ++step) {
    gemm_batched(s, a, x, tall ? Trans::yes : Trans::no, x, tall ? Trans::no : Trans::yes);
    copy_cast(s, b, a);
    gemm_batched(s, b, a, Trans::no, a, Trans::no, kQuinticC, kQuinticB);
    copy_cast(s, y, x);
    if (tall) {
      gemm_batched(s, y, x, Trans::no, b, Trans::no, 1.f, kQuinticA);
    } else {
      gemm_batched(s, y, b, Trans::no, x, Trans::no, 1.f, kQuinticA);
    }
    std::swap(x, y);
  }
  return x;
}

template <bool wide, class T, class Source, class Result>
void orthogonalise(Stream& s, const Plan& plan, const Workspace& w, int steps, const Source& source,
                   const Result& result) {
  const cudaStream_t stream = cuda_stream(s);
  double *partial = w.partial.as<double>(), *inverse = w.inverse.as<double>();
  for (int64_t first = 0; first < plan.count; first += plan.group) {
    const int64_t count = std::min(plan.group, plan.count - first);
    const unsigned blocks = static_cast<unsigned>(count * plan.pieces);
    const Source from = source.from(first);
    partial_norms_kernel<<<blocks, kThreads, 0, stream>>>(from, plan.n, plan.pieces, partial);
    CUDA_CHECK(cudaGetLastError());
    norms_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(partial, plan.pieces, inverse);
    CUDA_CHECK(cudaGetLastError());
    normalise_kernel<wide><<<blocks, kThreads, 0, stream>>>(data_of<T>(w.x), from, plan.n, plan.pieces, inverse);
    CUDA_CHECK(cudaGetLastError());
    const Tensor x = iterate(s, plan, w, count, steps);
    finish_kernel<wide, T><<<blocks, kThreads, 0, stream>>>(result.from(first), data_of<T>(x), plan.n, plan.pieces);
    CUDA_CHECK(cudaGetLastError());
  }
}

// Matrices `stride` elements apart can be read in packets.
template <class... Tensors>
bool wide_blocks(const Plan& plan, int64_t stride, const Tensors&... tensors) {
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
  return plan.n % kPacket == 0 && stride % kPacket == 0 && (aligned(tensors) && ...);
}

}  // namespace

void newton_schulz(Stream& s, Tensor x, int steps) {
  const Plan plan(x, DType::bf16);
  const ScratchScope scope(s);
  const Workspace w(s, plan);
  if (s.planning()) return;
  const auto run = [&](auto width) {
    constexpr bool wide = decltype(width)::value;
    orthogonalise<wide, bf16_t>(s, plan, w, steps, Given<wide>{x.f32(), plan.n}, Write<wide>{x.f32(), plan.n});
  };
  if (wide_blocks(plan, plan.n, x)) return run(std::true_type{});
  run(std::false_type{});
}

void muon_step(Stream& s, const Muon& h, Tensor p, Tensor g, Tensor m, int64_t block_stride, float grad_scale) {
  const Plan plan(p, h.fp32_newton_schulz ? DType::f32 : DType::bf16);
  const ScratchScope scope(s);
  const Workspace w(s, plan);
  if (s.planning()) return;
  const float scale = h.update_scale * std::sqrt(static_cast<float>(std::max(plan.rows, plan.cols)));
  with_activation(plan.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto width) {
      constexpr bool wide = decltype(width)::value;
      orthogonalise<wide, T>(s, plan, w, h.ns_steps,
                             Momentum<wide>{g.f32(), m.f32(), block_stride, grad_scale, h.momentum, h.nesterov},
                             Update<wide>{p.f32(), block_stride, h.lr, scale, h.weight_decay});
    };
    if (wide_blocks(plan, block_stride, p, g, m)) return run(std::true_type{});
    run(std::false_type{});
  });
}

}  // namespace kestrel::cuda
