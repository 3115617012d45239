// Backward: dy and h read once, every source read once from memory and once more from cache, every source gradient
// (F32) read and written once: N D (4 + 10 S) bytes in BF16.  About 12 operations per element of a source: bound by
// memory.
//
// Group kernel: a block takes a piece of tokens, one after the other, and keeps its sums over tokens (du, and dw of the
// output norm) in registers.  For each token: the gradient dh of the mixed row; b_j = <dh, v_j> and l_j = r_j <u, v_j>
// for all sources, four at a time; then, delta = sum_j a_j b_j being known, the gradients of the sources.  One partial
// [2, D] per piece goes to scratch and a second kernel adds the pieces in order.
#include "kernels/attn_res/attn_res_cuda.h"
#include "kernels/attn_res/mix.cuh"
#include "kernels/core/column_sum.cuh"
#include "kernels/norm/norm_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int64_t kLeastRows = 4;  // of a piece

template <class T, int capacity>
struct Backward {
  int64_t N, rows_per_piece;
  int D, S;
  RowsList<T, capacity> sources;
  RowsList<float, capacity> dsources;
  Rows<float> alpha, mix_rstd;
  const float *mix_norm, *query;
  Rows<T> dy;
  // The output norm; without it (out_norm null) dh is dy.
  Rows<T> h;
  const float *out_norm, *rstd;
  float* partial;  // [pieces, 2, D]: du, dw
};

// What the sources' gradients need of one token and source.
struct Slope {
  float a, k, m;  // dv += a dh + k u - m v;  du += k v
};
__device__ __forceinline__ Slope slope_of(float alpha, float rstd, float b, float l, float delta, int D) {
  const float k = alpha * (b - delta) * rstd;
  return {alpha, k, k * l * rstd / static_cast<float>(D)};
}

template <class T, int G, int kPackets>
__global__ void __launch_bounds__(G) group_backward(const __grid_constant__ Backward<T, kFewSources> a) {
  using Packet = Packed<T, kPacket>;
  constexpr int kPair = kPackets == 1 ? 2 : 1;  // sources whose gradients are in flight together
  __shared__ typename BlockSum8<G>::Shared sums;
  __shared__ float shared[G / kWarp];
  __shared__ float b[kFewSources], l[kFewSources];
  BlockSum8<G> block(sums);
  const int D = a.D, S = a.S;
  int column[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) column[i] = (i * G + static_cast<int>(threadIdx.x)) * kPacket;
  float u[kPackets][kPacket] = {}, du[kPackets][kPacket] = {}, dw[kPackets][kPacket] = {};
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (column[i] >= D) continue;
    float p[kPacket];
    load<kPacket, Cache::constant>(u[i], a.mix_norm + column[i]);
    load<kPacket, Cache::constant>(p, a.query + column[i]);
#pragma unroll
    for (int c = 0; c < kPacket; ++c) u[i][c] *= p[c];
  }
  const int64_t first = blockIdx.x * a.rows_per_piece;
  const int64_t last = first + a.rows_per_piece < a.N ? first + a.rows_per_piece : a.N;
  for (int64_t n = first; n < last; ++n) {
    float dh[kPackets][kPacket] = {};
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      if (column[i] < D) load<kPacket, Cache::once>(dh[i], a.dy[n] + column[i]);
    }
    if (a.out_norm) {
      float h[kPackets][kPacket] = {}, product = 0.f;
      const float r = a.rstd[n];
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        if (column[i] >= D) continue;
        float w[kPacket];
        load<kPacket, Cache::once>(h[i], a.h[n] + column[i]);
        load<kPacket, Cache::constant>(w, a.out_norm + column[i]);
#pragma unroll
        for (int c = 0; c < kPacket; ++c) {
          dw[i][c] += dh[i][c] * (h[i][c] * r);
          dh[i][c] *= w[c];
          product += dh[i][c] * h[i][c];
        }
      }
      product = block_sum<G>(product, shared);
      const float k = r * r * r * (product / static_cast<float>(D));
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
#pragma unroll
        for (int c = 0; c < kPacket; ++c) dh[i][c] = r * dh[i][c] - k * h[i][c];
      }
    }

    float delta = 0.f;
    for (int j0 = 0; j0 < S; j0 += kBatch) {
      Packet v[kBatch][kPackets];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] < D) v[j][i].load(a.sources[j0 + j][n] + column[i]);
        }
      }
      float x[2 * kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          float row[kPacket];
          v[j][i].unpack(row);
#pragma unroll
          for (int c = 0; c < kPacket; ++c) {
            x[2 * j] += dh[i][c] * row[c];
            x[2 * j + 1] += u[i][c] * row[c];
          }
        }
      }
      block.sum(x);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j0 + j >= S) continue;
        delta += a.alpha[n][j0 + j] * x[2 * j];
        if (threadIdx.x == 0) {
          b[j0 + j] = x[2 * j];
          l[j0 + j] = a.mix_rstd[n][j0 + j] * x[2 * j + 1];
        }
      }
    }
    __syncthreads();
    // b and l are written again only after the next token's first sum, which every thread reaches after this loop.
    for (int j0 = 0; j0 < S; j0 += kPair) {
      Packet v[kPair][kPackets];
      Packed<float, kPacket> dv[kPair][kPackets];
#pragma unroll
      for (int j = 0; j < kPair; ++j) {
        if (j0 + j >= S) continue;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          v[j][i].template load<Cache::once>(a.sources[j0 + j][n] + column[i]);
          dv[j][i].template load<Cache::once>(a.dsources[j0 + j][n] + column[i]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPair; ++j) {
        if (j0 + j >= S) continue;
        const Slope s = slope_of(a.alpha[n][j0 + j], a.mix_rstd[n][j0 + j], b[j0 + j], l[j0 + j], delta, D);
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          if (column[i] >= D) continue;
          float row[kPacket], sum[kPacket];
          v[j][i].unpack(row);
          dv[j][i].unpack(sum);
#pragma unroll
          for (int c = 0; c < kPacket; ++c) {
            sum[c] += s.a * dh[i][c] + (s.k * u[i][c] - s.m * row[c]);
            du[i][c] += s.k * row[c];
          }
          store<kPacket, Cache::once>(a.dsources[j0 + j][n] + column[i], sum);
        }
      }
    }
  }
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * D;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    if (column[i] >= D) continue;
    store(partial + column[i], du[i]);
    store(partial + D + column[i], dw[i]);
  }
}

// A block per piece; each thread owns columns kLoopThreads apart, in all gradients and in the partial sums.
template <class T>
__global__ void __launch_bounds__(kLoopThreads) loop_backward(const __grid_constant__ Backward<T, kManySources> a) {
  __shared__ float shared[kLoopThreads / kWarp];
  __shared__ float b[kManySources], l[kManySources];
  const int D = a.D, S = a.S, thread = static_cast<int>(threadIdx.x);
  float *du = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * D, *dw = du + D;
  const int64_t first = blockIdx.x * a.rows_per_piece;
  const int64_t last = first + a.rows_per_piece < a.N ? first + a.rows_per_piece : a.N;
  for (int c = thread; c < D; c += kLoopThreads) du[c] = dw[c] = 0.f;
  for (int64_t n = first; n < last; ++n) {
    const T* dy = a.dy[n];
    float r = 1.f, k = 0.f;
    if (a.out_norm) {
      r = a.rstd[n];
      float product = 0.f;
      for (int c = thread; c < D; c += kLoopThreads) {
        const float d = to_float(dy[c]), h = to_float(a.h[n][c]);
        dw[c] += d * (h * r);
        product += a.out_norm[c] * d * h;
      }
      k = r * r * r * (block_sum<kLoopThreads>(product, shared) / static_cast<float>(D));
    }
    const auto dh = [&](int c) {
      const float d = to_float(dy[c]);
      return a.out_norm ? r * (a.out_norm[c] * d) - k * to_float(a.h[n][c]) : d;
    };
    float delta = 0.f;
    for (int j = 0; j < S; ++j) {
      const T* v = a.sources[j][n];
      float grad = 0.f, score = 0.f;
      for (int c = thread; c < D; c += kLoopThreads) {
        const float x = to_float(v[c]);
        grad += dh(c) * x;
        score += a.mix_norm[c] * a.query[c] * x;
      }
      grad = block_sum<kLoopThreads>(grad, shared);
      score = block_sum<kLoopThreads>(score, shared);
      delta += a.alpha[n][j] * grad;
      if (thread == 0) {
        b[j] = grad;
        l[j] = a.mix_rstd[n][j] * score;
      }
    }
    __syncthreads();
    for (int j = 0; j < S; ++j) {
      const Slope s = slope_of(a.alpha[n][j], a.mix_rstd[n][j], b[j], l[j], delta, D);
      const T* v = a.sources[j][n];
      float* dv = a.dsources[j][n];
      for (int c = thread; c < D; c += kLoopThreads) {
        const float x = to_float(v[c]);
        dv[c] += s.a * dh(c) + (s.k * (a.mix_norm[c] * a.query[c]) - s.m * x);
        du[c] += s.k * x;
      }
    }
    __syncthreads();
  }
}

// What a launch is told, before the element type is known; h, out_norm, rstd and dout_norm are empty without a norm.
struct Launch {
  const std::vector<Tensor>&sources, &dsources;
  Tensor dy, alpha, mix_rstd, mix_norm, query, dmix_norm, dmix_query;
  Tensor h, out_norm, rstd, dout_norm;
};

template <class T, int capacity>
Backward<T, capacity> arguments(const Launch& t, int64_t rows_per_piece, float* partial) {
  return {t.dy.rows(),
          rows_per_piece,
          static_cast<int>(t.dy.cols()),
          static_cast<int>(t.sources.size()),
          RowsList<T, capacity>(t.sources),
          RowsList<float, capacity>(t.dsources),
          Rows<float>(t.alpha),
          Rows<float>(t.mix_rstd),
          t.mix_norm.f32(),
          t.query.f32(),
          Rows<T>(t.dy),
          Rows<T>(t.h),
          t.out_norm ? t.out_norm.f32() : nullptr,
          t.rstd ? t.rstd.f32() : nullptr,
          partial};
}

// dg += p * du, dp += g * du, with du the sum over all tokens.
struct UnfoldQuery {
  float *dnorm_weight, *dquery;
  const float *norm_weight, *query;
  __device__ void operator()(int64_t c, float du) const {
    dnorm_weight[c] += query[c] * du;
    dquery[c] += norm_weight[c] * du;
  }
};

void launch(Stream& s, const Launch& t) {
  const int64_t N = t.dy.rows(), D = t.dy.cols();
  const Pieces pieces = pieces_of(N, kLeastRows);
  ScratchScope scope(s);
  const Tensor scratch = s.temp({pieces.count, 2, D});
  if (s.planning() || N == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  float* partial = scratch.f32();
  const bool aligned = t.sources.size() <= kFewSources && all_wide(kPacket, t.sources) &&
                       all_wide(kPacket, t.dsources) && all_wide(kPacket, t.dy, t.mix_norm, t.query, t.h, t.out_norm);
  with_activation(t.dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const unsigned blocks = static_cast<unsigned>(pieces.count);
    const auto group = [&](auto size) {
      constexpr int G = decltype(size)::kThreads, P = decltype(size)::kPackets;
      group_backward<T, G, P><<<blocks, G, 0, stream>>>(arguments<T, kFewSources>(t, pieces.rows, partial));
    };
    // One packet a thread: the sums over tokens and a pair of gradients then fit in 100 registers or so.
    const bool grouped =
        aligned && with_group<Group<64, 1>, Group<128, 1>, Group<256, 1>, Group<512, 1>, Group<512, 2>>(D, group);
    if (!grouped) {
      loop_backward<T><<<blocks, kLoopThreads, 0, stream>>>(arguments<T, kManySources>(t, pieces.rows, partial));
    }
  });
  CUDA_CHECK(cudaGetLastError());
  column_sum(stream, partial, pieces.count, 2 * D, D,
             UnfoldQuery{t.dmix_norm.f32(), t.dmix_query.f32(), t.mix_norm.f32(), t.query.f32()});
  if (t.dout_norm) column_sum(stream, partial + D, pieces.count, 2 * D, D, AddTo{t.dout_norm.f32()});
}

}  // namespace

void attn_res_backward(Stream& s, const std::vector<Tensor>& dsources, Tensor dnorm_weight, Tensor dquery, Tensor dy,
                       const std::vector<Tensor>& sources, Tensor alpha, Tensor rstd, Tensor norm_weight,
                       Tensor query) {
  launch(s, {sources, dsources, dy, alpha, rstd, norm_weight, query, dnorm_weight, dquery, {}, {}, {}, {}});
}

void residual_site_backward(Stream& s, const ResidualSite& site, const std::vector<Tensor>& sources,
                            const std::vector<Tensor>& dsources, const ResidualSiteGrads& grads, Tensor dy) {
  if (sources.empty()) {
    return rms_norm_backward(s, grads.dprefix, grads.dout_norm, dy, site.prefix, site.out_norm, site.rstd, 1.f);
  }
  launch(s, {sources, dsources, dy, site.alpha, site.mix_rstd, site.mix_norm, site.mix_query, grads.dmix_norm,
             grads.dmix_query, site.h, site.out_norm, site.rstd, grads.dout_norm});
}

}  // namespace kestrel::cuda
