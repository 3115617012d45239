// Forward: every source is read once (2 N D bytes each in BF16), prefix_in and delta instead of the last one when they
// are added here, prefix, h and y written once.  About 6 operations per element of a source: bound by memory.
//
// Group kernel: a block per token.  Sources come in batches of four, whose loads are in flight together; the softmax
// over depth is kept as running maximum, sum and weighted row (h), so no source is needed twice.  Recomputing h runs
// the same code on the same sources, which gives the same bits as forward.
#include <cmath>

#include "kernels/attn_res/attn_res_cuda.h"
#include "kernels/attn_res/mix.cuh"
#include "kernels/core/pointwise.cuh"
#include "kernels/norm/norm_cuda.h"

namespace kestrel::cuda {
namespace {

// Outputs whose pointer is null are not wanted.
template <class T, int capacity>
struct Forward {
  int64_t N;
  int D, S;  // S = 0: h is the prefix
  float eps;
  Rows<T> prefix_in, delta;  // both given: prefix = prefix_in + delta is written first, and is the last source
  Rows<T> prefix;
  RowsList<T, capacity> sources;
  const float *mix_norm, *query;
  const float* out_norm;  // null: y = h
  Rows<T> h, y;
  Rows<float> alpha, mix_rstd;
  float* rstd;
};

// prefix = prefix_in + delta, rounded; stored and kept.
template <class T, int capacity>
__device__ __forceinline__ void add_prefix(Packed<T, kPacket>& sum, const Forward<T, capacity>& a, int64_t n, int c) {
  Packed<T, kPacket> x, d;
  x.template load<Cache::once>(a.prefix_in[n] + c);
  d.template load<Cache::once>(a.delta[n] + c);
  float xs[kPacket], ds[kPacket];
  x.unpack(xs);
  d.unpack(ds);
#pragma unroll
  for (int i = 0; i < kPacket; ++i) xs[i] += ds[i];
  sum.pack(xs);
  sum.store(a.prefix[n] + c);
}

template <class T, int G, int kPackets>
__global__ void __launch_bounds__(G) group_forward(const __grid_constant__ Forward<T, kFewSources> a) {
  using Packet = Packed<T, kPacket>;
  __shared__ typename BlockSum8<G>::Shared sums;
  __shared__ float shared[G / kWarp];
  __shared__ float scores[kFewSources];
  BlockSum8<G> block(sums);
  const int64_t n = blockIdx.x;
  const int D = a.D, S = a.S;
  const bool adds = static_cast<bool>(a.prefix_in);
  int column[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) column[i] = (i * G + static_cast<int>(threadIdx.x)) * kPacket;

  Packet prefix[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (column[i] >= D) continue;
    if (adds) {
      add_prefix(prefix[i], a, n, column[i]);
    } else if (S == 0) {
      prefix[i].load(a.prefix[n] + column[i]);
    }
  }
  float h[kPackets][kPacket] = {};
  if (S == 0) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      if (column[i] < D) prefix[i].unpack(h[i]);
    }
  } else {
    float u[kPackets][kPacket];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      if (column[i] >= D) continue;
      float p[kPacket];
      load<kPacket, Cache::constant>(u[i], a.mix_norm + column[i]);
      load<kPacket, Cache::constant>(p, a.query + column[i]);
#pragma unroll
      for (int k = 0; k < kPacket; ++k) u[i][k] *= p[k];
    }
    float highest = -INFINITY, total = 0.f;
    for (int j0 = 0; j0 < S; j0 += kBatch) {
      Packet v[kBatch][kPackets];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
        const bool own = adds && j0 + j == S - 1;
        const T* from = own ? nullptr : a.sources[j0 + j][n];
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          if (own) {
            v[j][i] = prefix[i];
          } else {
            v[j][i].template load<Cache::once>(from + column[i]);
          }
        }
      }
      float x[2 * kBatch] = {};  // squares and scores of the batch
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          float row[kPacket];
          v[j][i].unpack(row);
#pragma unroll
          for (int k = 0; k < kPacket; ++k) {
            x[2 * j] += row[k] * row[k];
            x[2 * j + 1] += u[i][k] * row[k];
          }
        }
      }
      block.sum(x);
      float score[kBatch], next = highest;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) {
          score[j] = -INFINITY;
          continue;
        }
        const float r = 1.f / sqrtf(x[2 * j] / static_cast<float>(D) + a.eps);
        score[j] = r * x[2 * j + 1];
        next = fmaxf(next, score[j]);
        if (threadIdx.x == 0) {
          scores[j0 + j] = score[j];
          if (a.mix_rstd) a.mix_rstd[n][j0 + j] = r;
        }
      }
      const float rescale = exp_fast(highest - next);  // 0 in the first batch
      highest = next;
      total *= rescale;
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
#pragma unroll
        for (int k = 0; k < kPacket; ++k) h[i][k] *= rescale;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
        const float weight = exp_fast(score[j] - highest);
        total += weight;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          float row[kPacket];
          v[j][i].unpack(row);
#pragma unroll
          for (int k = 0; k < kPacket; ++k) h[i][k] += weight * row[k];
        }
      }
    }
    const float inverse = 1.f / total;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
#pragma unroll
      for (int k = 0; k < kPacket; ++k) h[i][k] *= inverse;
    }
    if (a.alpha) {
      __syncthreads();
      for (int j = static_cast<int>(threadIdx.x); j < S; j += G) {
        a.alpha[n][j] = exp_fast(scores[j] - highest) * inverse;
      }
    }
  }

  // The norm sees h as it lies in memory, so that y can be recomputed from h.
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (column[i] >= D) continue;
    Packet rounded;
    rounded.pack(h[i]);
    if (a.h) rounded.store(a.h[n] + column[i]);
    rounded.unpack(h[i]);
#pragma unroll
    for (int k = 0; k < kPacket; ++k) squares += h[i][k] * h[i][k];
  }
  if (!a.y) return;
  float r = 1.f;
  if (a.out_norm) {
    squares = block_sum<G>(squares, shared);
    r = 1.f / sqrtf(squares / static_cast<float>(D) + a.eps);
    if (threadIdx.x == 0) a.rstd[n] = r;
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (column[i] >= D) continue;
    if (a.out_norm) {
      float w[kPacket];
      load<kPacket, Cache::constant>(w, a.out_norm + column[i]);
#pragma unroll
      for (int k = 0; k < kPacket; ++k) h[i][k] = w[k] * (h[i][k] * r);
    }
    store(a.y[n] + column[i], h[i]);
  }
}

// A block per token; each thread owns columns kLoopThreads apart, reads the sources twice and its own h once more.
template <class T>
__global__ void __launch_bounds__(kLoopThreads) loop_forward(const __grid_constant__ Forward<T, kManySources> a) {
  __shared__ float shared[kLoopThreads / kWarp];
  __shared__ float weights[kManySources];
  const int64_t n = blockIdx.x;
  const int D = a.D, S = a.S, first = static_cast<int>(threadIdx.x);
  if (a.prefix_in) {
    for (int c = first; c < D; c += kLoopThreads) {
      a.prefix[n][c] = from_float<T>(to_float(a.prefix_in[n][c]) + to_float(a.delta[n][c]));
    }
  }
  float highest = -INFINITY, total = 0.f;
  for (int j = 0; j < S; ++j) {
    const T* v = a.sources[j][n];
    float squares = 0.f, score = 0.f;
    for (int c = first; c < D; c += kLoopThreads) {
      const float x = to_float(v[c]);
      squares += x * x;
      score += a.mix_norm[c] * a.query[c] * x;
    }
    squares = block_sum<kLoopThreads>(squares, shared);
    score = block_sum<kLoopThreads>(score, shared);
    const float r = 1.f / sqrtf(squares / static_cast<float>(D) + a.eps);
    highest = fmaxf(highest, r * score);
    if (first == 0) {
      weights[j] = r * score;
      if (a.mix_rstd) a.mix_rstd[n][j] = r;
    }
  }
  __syncthreads();
  for (int j = 0; j < S; ++j) total += exp_fast(weights[j] - highest);
  const float inverse = 1.f / total;
  __syncthreads();
  for (int j = first; j < S; j += kLoopThreads) {
    weights[j] = exp_fast(weights[j] - highest) * inverse;
    if (a.alpha) a.alpha[n][j] = weights[j];
  }
  __syncthreads();
  // h goes to its own matrix, or to y, from which this thread reads it back.
  const Rows<T>& h = a.h ? a.h : a.y;
  float squares = 0.f;
  for (int c = first; c < D; c += kLoopThreads) {
    float sum = 0.f;
    for (int j = 0; j < S; ++j) sum += weights[j] * to_float(a.sources[j][n][c]);
    const T rounded = S > 0 ? from_float<T>(sum) : a.prefix[n][c];
    h[n][c] = rounded;
    squares += to_float(rounded) * to_float(rounded);
  }
  if (!a.y || !a.out_norm) return;
  squares = block_sum<kLoopThreads>(squares, shared);
  const float r = 1.f / sqrtf(squares / static_cast<float>(D) + a.eps);
  if (first == 0) a.rstd[n] = r;
  for (int c = first; c < D; c += kLoopThreads) a.y[n][c] = from_float<T>(a.out_norm[c] * (to_float(h[n][c]) * r));
}

// What a launch is told, before the element type is known.  Empty tensors are not given or not wanted.
struct Launch {
  std::vector<Tensor> sources;
  Tensor prefix_in, delta, prefix, mix_norm, query, out_norm, h, y, alpha, mix_rstd, rstd;
  float eps;
};

template <class T, int capacity>
Forward<T, capacity> arguments(const Launch& l, int64_t N, int64_t D) {
  const auto floats = [](const Tensor& t) { return t ? t.f32() : nullptr; };
  return {N,
          static_cast<int>(D),
          static_cast<int>(l.sources.size()),
          l.eps,
          Rows<T>(l.prefix_in),
          Rows<T>(l.delta),
          Rows<T>(l.prefix),
          RowsList<T, capacity>(l.sources),
          floats(l.mix_norm),
          floats(l.query),
          floats(l.out_norm),
          Rows<T>(l.h),
          Rows<T>(l.y),
          Rows<float>(l.alpha),
          Rows<float>(l.mix_rstd),
          floats(l.rstd)};
}

void launch(cudaStream_t stream, const Launch& l) {
  const Tensor& like = l.prefix ? l.prefix : l.sources[0];
  const int64_t N = like.rows(), D = like.cols();
  if (N == 0) return;
  const bool aligned = l.sources.size() <= kFewSources && all_wide(kPacket, l.sources) &&
                       all_wide(kPacket, l.prefix_in, l.delta, l.prefix, l.mix_norm, l.query, l.out_norm, l.h, l.y);
  with_activation(like.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const unsigned blocks = static_cast<unsigned>(N);
    const auto group = [&](auto size) {
      constexpr int G = decltype(size)::kThreads, P = decltype(size)::kPackets;
      group_forward<T, G, P><<<blocks, G, 0, stream>>>(arguments<T, kFewSources>(l, N, D));
    };
    const bool grouped = aligned && with_group<Group<64, 2>, Group<128, 2>, Group<256, 2>, Group<512, 2>>(D, group);
    if (!grouped) loop_forward<T><<<blocks, kLoopThreads, 0, stream>>>(arguments<T, kManySources>(l, N, D));
  });
  CUDA_CHECK(cudaGetLastError());
}

// y = w (h r)
template <class T, int V>
struct Scale {
  Rows<T> y, h;
  const float *w, *r;
  struct Loaded {
    Packed<T, V> h;
    float r;
  };
  __device__ Loaded load(int64_t n, int64_t c) const {
    Loaded l;
    l.h.load(h[n] + c);
    l.r = r[n];
    return l;
  }
  __device__ void finish(int64_t n, int64_t c, const Loaded& l) const {
    float x[V], scale[V];
    l.h.unpack(x);
    cuda::load<V, Cache::constant>(scale, w + c);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = scale[i] * (x[i] * l.r);
    store(y[n] + c, x);
  }
};

}  // namespace

void attn_res_forward(Stream& s, Tensor y, Tensor alpha, Tensor rstd, const std::vector<Tensor>& sources,
                      Tensor norm_weight, Tensor query, float eps) {
  Launch l;
  l.sources = sources;
  l.mix_norm = norm_weight;
  l.query = query;
  l.y = y;
  l.alpha = alpha;
  l.mix_rstd = rstd;
  l.eps = eps;
  launch(cuda_stream(s), l);
}

void residual_site_forward(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources) {
  const bool adds = site.prefix_in && site.delta, mixes = !sources.empty();
  Launch l;
  l.sources = sources;
  if (adds) {
    l.prefix_in = site.prefix_in;
    l.delta = site.delta;
  }
  l.prefix = site.prefix;
  l.out_norm = site.out_norm;
  l.y = site.y;
  l.rstd = site.rstd;
  l.eps = site.eps;
  if (mixes) {
    l.mix_norm = site.mix_norm;
    l.query = site.mix_query;
    l.alpha = site.alpha;
    l.mix_rstd = site.mix_rstd;
    if (site.h.data != site.y.data) l.h = site.h;  // a caller that keeps no h passes y
  } else if (!adds) {
    return rms_norm_forward(s, site.y, site.rstd, site.prefix, site.out_norm, site.eps);
  }
  launch(cuda_stream(s), l);
}

void residual_site_recompute_h(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources) {
  Launch l;
  l.sources = sources;
  l.prefix = site.prefix;
  l.mix_norm = site.mix_norm;
  l.query = site.mix_query;
  l.h = site.h;
  l.eps = site.eps;
  launch(cuda_stream(s), l);
}

void residual_site_recompute_y(Stream& s, const ResidualSite& site) {
  const Tensor& h = site.mixes() ? site.h : site.prefix;
  const Extent e{h.rows(), h.cols()};
  with_activation(h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Rows<T> y(site.y), in(h);
    const float *w = site.out_norm.f32(), *r = site.rstd.f32();
    if (all_wide(kPacket, site.y, h, site.out_norm)) {
      pointwise<kPacket, 2>(cuda_stream(s), e, Scale<T, kPacket>{y, in, w, r});
    } else {
      pointwise<1, 2>(cuda_stream(s), e, Scale<T, 1>{y, in, w, r});
    }
  });
}

}  // namespace kestrel::cuda
