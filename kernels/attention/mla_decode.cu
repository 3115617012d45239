// Attention of new tokens over a cache of latents.  With the queries absorbed (q_h = W_k,h^T q_nope) all heads of a
// token read the same c + rope numbers a key, so a cache row is read from memory once and from L1 by the other heads.
//
//   1. query[M,H,c] = q_nope W_k             one product a head
//   2. a warp takes one (token, head) and a piece of the cache: scores, online softmax and the weighted sum of latents
//      stay in registers; pieces are joined in their order
//   3. o[M,H,v] = sum[M,H,c] W_v^T           one product a head
//
// The bits depend on the shapes alone.  A single new token over a long cache is bound by memory: S (c + rope) elements.
#include <algorithm>
#include <cmath>

#include "kernels/attention/attention_cuda.h"
#include "kernels/core/cuda.cuh"
#include "kernels/gemm/gemm_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int64_t kPiece = 64;          // keys of a piece at least
constexpr int64_t kBlocksWanted = 512;  // two to four a multiprocessor

int64_t pieces_of(int64_t rows, int64_t S) {
  const int64_t wanted = divide_up(kBlocksWanted, divide_up(rows, kWarps));
  return std::max<int64_t>(1, std::min({wanted, divide_up(S, kPiece), int64_t{65535}}));
}

template <class E>
struct Mix {
  const float* query;  // [rows, c]
  const E *q, *latent, *shared;
  int64_t q_ld, latent_ld, shared_ld;
  E* sum;          // [rows, c], of a single piece
  float* partial;  // [pieces, rows, c + 2]: weighted sum, largest score, sum of weights
  int64_t rows, past, piece;
  int c, nope, rope, heads;
  float scale;  // log2(e) (nope + rope)^(-1/2)
};

// P numbers a lane: element 32 i + lane of [latent ; k_shared].  Keys are taken several at once, as far as registers
// go: their loads and reductions overlap.
template <class E, int P>
__global__ void __launch_bounds__(kThreads) mix_latents(Mix<E> a) {
  constexpr int kKeys = P <= 18 ? 4 : 2;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= a.rows) return;  // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarp, width = a.c + a.rope;
  const int64_t token = row / a.heads, head = row % a.heads;
  float q[P], sum[P];
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int at = i * kWarp + lane;
    const E* rope = a.q + token * a.q_ld + head * (a.nope + a.rope) + a.nope - a.c;
    q[i] = at < a.c ? a.query[row * a.c + at] : at < width ? to_float(rope[at]) : 0.f;
    q[i] *= a.scale;
    sum[i] = 0.f;
  }
  const int64_t begin = blockIdx.y * a.piece, seen = a.past + token + 1;
  const int64_t end = begin + a.piece < seen ? begin + a.piece : seen;
  float largest = -INFINITY, weights = 0.f;
  for (int64_t j0 = begin; j0 < end; j0 += kKeys) {
    float x[kKeys][P], score[kKeys], higher = largest;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int64_t j = j0 + k < end ? j0 + k : end - 1;
      score[k] = 0.f;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const int at = i * kWarp + lane;
        x[k][i] = at < a.c     ? to_float(a.latent[j * a.latent_ld + at])
                  : at < width ? to_float(a.shared[j * a.shared_ld + at - a.c])
                               : 0.f;
        score[k] = fmaf(q[i], x[k][i], score[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      score[k] = j0 + k < end ? warp_sum(score[k]) : -INFINITY;
      higher = fmaxf(higher, score[k]);
    }
    const float factor = exp2_fast(largest - higher);
    largest = higher;
    weights *= factor;
#pragma unroll
    for (int i = 0; i < P; ++i) sum[i] *= factor;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const float weight = exp2_fast(score[k] - largest);
      weights += weight;
#pragma unroll
      for (int i = 0; i < P; ++i) sum[i] = fmaf(weight, x[k][i], sum[i]);
    }
  }
  const float inverse = 1.f / weights;
  float* to = a.partial + (blockIdx.y * a.rows + row) * (a.c + 2);
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int at = i * kWarp + lane;
    if (at >= a.c) continue;
    if (gridDim.y == 1) {
      a.sum[row * a.c + at] = from_float<E>(sum[i] * inverse);
    } else {
      to[at] = sum[i];
    }
  }
  if (gridDim.y > 1 && lane == 0) to[a.c] = largest, to[a.c + 1] = weights;
}

// The pieces of a row, first to last.  A piece that a row does not reach has weight 0.
template <class E>
__global__ void __launch_bounds__(kThreads) join_pieces(E* sum, const float* partial, int64_t rows, int c, int pieces) {
  const int64_t row = blockIdx.x;
  const auto piece = [&](int i) { return partial + (i * rows + row) * (c + 2); };
  float largest = -INFINITY, weights = 0.f;
  for (int i = 0; i < pieces; ++i) largest = fmaxf(largest, piece(i)[c]);
  for (int i = 0; i < pieces; ++i) weights += piece(i)[c + 1] * exp2_fast(piece(i)[c] - largest);
  const float inverse = 1.f / weights;
  for (int at = static_cast<int>(threadIdx.x); at < c; at += kThreads) {
    float total = 0.f;
    for (int i = 0; i < pieces; ++i) total = fmaf(piece(i)[at], exp2_fast(piece(i)[c] - largest), total);
    sum[row * c + at] = from_float<E>(total * inverse);
  }
}

template <class E>
void mix(cudaStream_t stream, const Mix<E>& a, int64_t pieces) {
  const dim3 grid(static_cast<unsigned>(divide_up(a.rows, kWarps)), static_cast<unsigned>(pieces));
  const int width = a.c + a.rope;
  if (width <= 4 * kWarp) {
    mix_latents<E, 4><<<grid, kThreads, 0, stream>>>(a);
  } else if (width <= 18 * kWarp) {  // the published 512 + 64
    mix_latents<E, 18><<<grid, kThreads, 0, stream>>>(a);
  } else {
    mix_latents<E, kMostLatentChannels / kWarp><<<grid, kThreads, 0, stream>>>(a);
  }
  CUDA_CHECK(cudaGetLastError());
  if (pieces == 1) return;
  join_pieces<E>
      <<<static_cast<unsigned>(a.rows), kThreads, 0, stream>>>(a.sum, a.partial, a.rows, a.c, static_cast<int>(pieces));
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void mla_decode(Stream& s, const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared,
                Tensor kv_b) {
  const int64_t M = q.rows(), rows = M * d.H, c = latent.cols(), S = latent.rows();
  if (c + d.rope > kMostLatentChannels) {
    throw ConfigError(text("decoding on CUDA takes at most ", kMostLatentChannels,
                           " channels of latent and shared key together, this model has ", c, " + ", d.rope,
                           ". Decode on the CPU."));
  }
  ScratchScope scope(s);
  const int64_t pieces = pieces_of(rows, S);
  const Tensor query = s.temp({rows, c}), sum = s.temp({rows, c}, o.dtype);
  const Tensor partial = pieces > 1 ? s.temp({pieces * rows, c + 2}) : Tensor{};
  if (s.planning() || M == 0) return;

  GemmProblem absorb;  // query[m,h,:] = q[m,h,:nope] W_k,h
  absorb.M = M, absorb.N = c, absorb.K = d.nope, absorb.batch = d.H;
  absorb.a = q.data, absorb.lda = q.ld, absorb.a_stride = d.nope + d.rope;
  absorb.b = kv_b.data, absorb.ldb = kv_b.ld, absorb.b_stride = (d.nope + d.v) * kv_b.ld;
  absorb.c = query.data, absorb.ldc = d.H * c, absorb.c_stride = c;
  absorb.in = q.dtype, absorb.out = DType::f32;
  gemm(s, absorb);

  with_activation(q.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    Mix<E> a;
    a.query = query.f32();
    a.q = data_of<E>(q), a.q_ld = q.ld;
    a.latent = data_of<E>(latent), a.latent_ld = latent.ld;
    a.shared = data_of<E>(k_shared), a.shared_ld = k_shared.ld;
    a.sum = data_of<E>(sum);
    a.partial = pieces > 1 ? partial.f32() : nullptr;
    a.rows = rows, a.past = past, a.piece = divide_up(S, pieces);
    a.c = static_cast<int>(c), a.nope = static_cast<int>(d.nope), a.rope = static_cast<int>(d.rope);
    a.heads = static_cast<int>(d.H);
    a.scale = kLog2e / std::sqrt(static_cast<float>(d.nope + d.rope));
    mix(cuda_stream(s), a, pieces);
  });

  GemmProblem expand;  // o[m,h,:] = sum[m,h,:] W_v,h^T
  expand.tb = Trans::yes;
  expand.M = M, expand.N = d.v, expand.K = c, expand.batch = d.H;
  expand.a = sum.data, expand.lda = d.H * c, expand.a_stride = c;
  expand.b = static_cast<const char*>(kv_b.data) + d.nope * kv_b.ld * size_of(kv_b.dtype), expand.ldb = kv_b.ld;
  expand.b_stride = (d.nope + d.v) * kv_b.ld;
  expand.c = o.data, expand.ldc = o.ld, expand.c_stride = d.v;
  expand.in = q.dtype, expand.out = o.dtype;
  gemm(s, expand);
}

}  // namespace kestrel::cuda
