// The chunk-parallel part of the forward pass: norms, gate, scores, the triangular inverse.
//
// One block per chunk and head.  Bytes: 6 K read and 6 K + 256 written per token (q, k, gate; k_in, q_in, k_out, A,
// Aqk, all 16 bit): 1.8 KB per token and head at K = 128.  FLOPs: 10 tile pairs x 2 scores x 512 K, the four on the
// diagonal in tf32.  Bound by memory; close behind come the exponentials (about 9 per channel and token, of which 5 for
// tile pairs).
#include "kernels/kda/kda_chunk.cuh"
#include "kernels/kda/kda_launch.cuh"

namespace kestrel::cuda::kda {
namespace {

constexpr int64_t kElements = int64_t{kChunk} * kChunk;

template <int D>
struct Shared {
  float G[kChunk * kDecayStride<D>];
  union {
    bf16_t gate[kChunk * kRowStride<D>];  // until G is there
    float Akk[kChunk * kSquareStride];    // times beta
  };
  float solve[kChunk * kSquareStride];
  bf16_t q[kChunk * kRowStride<D>], k[kChunk * kRowStride<D>];
  float sums[ChannelWalk<D>::kGroups * D];
  float q_scale[kChunk], k_scale[kChunk], beta[kChunk];
  int first[kChunk];
};
static_assert(2 * sizeof(Shared<128>) <= 226 * 1024, "two blocks of a multiprocessor's 228 KB, 1 KB of each reserved");

template <int D>
__device__ __forceinline__ void load_tokens(const Tokens& in, const Place& p, Shared<D>& s) {
  fetch_rows<D>(s.gate, in.gate + p.row * in.gate_ld + p.h * D, in.gate_ld, p.length);
  fetch_rows<D>(s.q, in.q + p.row * in.q_ld + p.h * D, in.q_ld, p.length);
  fetch_rows<D>(s.k, in.k + p.row * in.k_ld + p.h * D, in.k_ld, p.length);
  commit_copies();
  const int i = static_cast<int>(threadIdx.x);
  if (i < kChunk) {
    s.beta[i] = i < p.length ? sigmoid(to_float(in.beta[(p.row + i) * in.beta_ld + p.h])) : 0.f;
    s.first[i] = first_visible(in, p, i);
  }
  wait_copies<0>();
  __syncthreads();
}

__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

// k_in, q_in, k_out and the chunk's decay, eight channels of a token at a time.
template <int D>
__device__ __forceinline__ void store_rows(const Place& p, const Shared<D>& s, const Prepared& out) {
  constexpr int kUnits = D / 8;
  const int border = s.first[p.length - 1];  // tokens before it do not reach the chunk's end
  const float* end = s.G + (kChunk - 1) * kDecayStride<D>;
#pragma unroll 2
  for (int at = static_cast<int>(threadIdx.x); at < kChunk * kUnits; at += kLocalThreads) {
    const int row = at / kUnits, c = at % kUnits * 8;
    const float inside = s.first[row] < 0 ? 1.f : 0.f, leaves = row >= border ? s.k_scale[row] : 0.f;
    const float q_scale = inside * s.q_scale[row], k_scale = inside * s.k_scale[row];
    float q_in[8], k_in[8], k_out[8];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 q = bf16_pair(s.q + row * kRowStride<D> + c + e), k = bf16_pair(s.k + row * kRowStride<D> + c + e);
      const float2 G = *reinterpret_cast<const float2*>(s.G + row * kDecayStride<D> + c + e);
      const float2 last = *reinterpret_cast<const float2*>(end + c + e);
      const float2 in = {exp2_fast(G.x), exp2_fast(G.y)}, rest = {exp2_fast(last.x - G.x), exp2_fast(last.y - G.y)};
      q_in[e] = q.x * q_scale * in.x, q_in[e + 1] = q.y * q_scale * in.y;
      k_in[e] = k.x * k_scale * in.x, k_in[e + 1] = k.y * k_scale * in.y;
      k_out[e] = k.x * leaves * rest.x, k_out[e + 1] = k.y * leaves * rest.y;
    }
    const int64_t to = p.index * kChunk * D + row * D + c;
    *reinterpret_cast<uint4*>(out.q_in + to) = pack8(q_in);
    *reinterpret_cast<uint4*>(out.k_in + to) = pack8(k_in);
    *reinterpret_cast<uint4*>(out.k_out + to) = pack8(k_out);
  }
  const int i = static_cast<int>(threadIdx.x);
  if (i < D) out.decay[p.index * D + i] = border < 0 ? exp2_fast(end[i]) : 0.f;
  if (i < kChunk) out.beta[p.index * kChunk + i] = s.beta[i];
}

// A lane's four channel pairs of a 16-channel step: pair h holds channels c + 8 h, c + 8 h + 1 with c = 16 step + 2 t.
// For bf16 they are the operand's own layout; for tf32 step h takes channel c + 8 h as k = t and the next as k = t + 4.
struct Scores {
  float qk[2][4], kk[2][4];
};

// Raw scores of row tile I and column tile J.
template <int D, bool tf32>
__device__ __forceinline__ Scores tile_scores(const Shared<D>& s, int I, int J, float offset) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
  const int row0 = I * kTileRows + g, row1 = row0 + 8, col0 = J * kTileRows + g;
  const float q_scale[2] = {s.q_scale[row0], s.q_scale[row1]}, k_scale[2] = {s.k_scale[row0], s.k_scale[row1]};
  const float col_scale[2] = {s.k_scale[col0], s.k_scale[col0 + 8]};
  Scores sum = {};
#pragma unroll 2
  for (int step = 0; step < D / 16; ++step) {
    float2 q[2][2], k[2][2], col[2][2];  // [row or column tile half][channel half]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = step * 16 + h * 8 + t * 2;
      const float2 anchor = *reinterpret_cast<const float2*>(s.G + I * kTileRows * kDecayStride<D> + c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + half * 8, j = col0 + half * 8;
        const float2 Gi = *reinterpret_cast<const float2*>(s.G + row * kDecayStride<D> + c);
        const float2 Gj = *reinterpret_cast<const float2*>(s.G + j * kDecayStride<D> + c);
        const float2 rise = {exp2_fast(Gi.x - anchor.x + offset), exp2_fast(Gi.y - anchor.y + offset)};
        const float2 fall = {exp2_fast(anchor.x - offset - Gj.x), exp2_fast(anchor.y - offset - Gj.y)};
        const float2 x = bf16_pair(s.q + row * kRowStride<D> + c), y = bf16_pair(s.k + row * kRowStride<D> + c);
        const float2 z = bf16_pair(s.k + j * kRowStride<D> + c);
        q[half][h] = {x.x * q_scale[half] * rise.x, x.y * q_scale[half] * rise.y};
        k[half][h] = {y.x * k_scale[half] * rise.x, y.y * k_scale[half] * rise.y};
        col[half][h] = {z.x * col_scale[half] * fall.x, z.y * col_scale[half] * fall.y};
      }
    }
    if constexpr (tf32) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t a[4] = {to_tf32(q[0][h].x), to_tf32(q[1][h].x), to_tf32(q[0][h].y), to_tf32(q[1][h].y)};
        const uint32_t b[4] = {to_tf32(k[0][h].x), to_tf32(k[1][h].x), to_tf32(k[0][h].y), to_tf32(k[1][h].y)};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t key[2] = {to_tf32(col[n][h].x), to_tf32(col[n][h].y)};
          mma_16x8x8(sum.qk[n], a, key);
          mma_16x8x8(sum.kk[n], b, key);
        }
      }
    } else {
      const uint32_t a[4] = {pack_bf16(q[0][0].x, q[0][0].y), pack_bf16(q[1][0].x, q[1][0].y),
                             pack_bf16(q[0][1].x, q[0][1].y), pack_bf16(q[1][1].x, q[1][1].y)};
      const uint32_t b[4] = {pack_bf16(k[0][0].x, k[0][0].y), pack_bf16(k[1][0].x, k[1][0].y),
                             pack_bf16(k[0][1].x, k[0][1].y), pack_bf16(k[1][1].x, k[1][1].y)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t key[2] = {pack_bf16(col[n][0].x, col[n][0].y), pack_bf16(col[n][1].x, col[n][1].y)};
        mma_16x8x16(sum.qk[n], a, key);
        mma_16x8x16(sum.kk[n], b, key);
      }
    }
  }
  return sum;
}

// Masked: Aqk to memory, beta Akk to shared memory.
template <int D>
__device__ __forceinline__ void store_scores(const Place& p, Shared<D>& s, const Prepared& out, int I, int J,
                                             const Scores& sum) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = I * kTileRows + g + half * 8, j = J * kTileRows + n * 8 + t * 2, first = s.first[i];
      const float q0 = j <= i && j >= first ? sum.qk[n][half * 2] : 0.f;
      const float q1 = j + 1 <= i && j + 1 >= first ? sum.qk[n][half * 2 + 1] : 0.f;
      const float k0 = j < i && j >= first ? s.beta[i] * sum.kk[n][half * 2] : 0.f;
      const float k1 = j + 1 < i && j + 1 >= first ? s.beta[i] * sum.kk[n][half * 2 + 1] : 0.f;
      *reinterpret_cast<uint32_t*>(out.scores + p.index * kElements + i * kChunk + j) = pack_bf16(q0, q1);
      *reinterpret_cast<float2*>(s.Akk + i * kSquareStride + j) = {k0, k1};
    }
  }
}

// The inverse of one diagonal tile I + L by forward substitution, a lane per column: x_i = [i = column] - L_i x.
__device__ __forceinline__ void invert_tile(const float* L, float* X) {
  const int column = lane_id();
  if (column >= kTileRows) return;
  float x[kTileRows];
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int l = 0; l < i; ++l) sum += L[i * kSquareStride + l] * x[l];
    x[i] = (i == column ? 1.f : 0.f) - sum;
  }
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) X[i * kSquareStride + column] = x[i];
}

// sum[16,16] += a b, tiles of two matrices with rows of kSquareStride.
__device__ __forceinline__ void tile_product(float (&sum)[2][4], const float* a, const float* b) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int c = step * 8 + t;
    const uint32_t left[4] = {to_tf32(a[g * kSquareStride + c]), to_tf32(a[(g + 8) * kSquareStride + c]),
                              to_tf32(a[g * kSquareStride + c + 4]), to_tf32(a[(g + 8) * kSquareStride + c + 4])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t right[2] = {to_tf32(b[c * kSquareStride + n * 8 + g]),
                                 to_tf32(b[(c + 4) * kSquareStride + n * 8 + g])};
      mma_16x8x8(sum[n], left, right);
    }
  }
}

__device__ __forceinline__ void store_tile(float* to, const float (&x)[2][4], float sign) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + (g + half * 8) * kSquareStride + n * 8 + t * 2) = {sign * x[n][half * 2],
                                                                                         sign * x[n][half * 2 + 1]};
    }
  }
}

// X_IJ = -X_II sum_{J <= l < I} L_Il X_lJ.  One warp.
__device__ __forceinline__ void merge_tile(const float* L, float* X, int I, int J) {
  const auto tile = [](int i, int j) { return (i * kSquareStride + j) * kTileRows; };
  float sum[2][4] = {}, result[2][4] = {};
  for (int l = J; l < I; ++l) tile_product(sum, L + tile(I, l), X + tile(l, J));
  store_tile(X + tile(I, J), sum, 1.f);
  __syncwarp();
  tile_product(result, X + tile(I, I), X + tile(I, J));
  __syncwarp();
  store_tile(X + tile(I, J), result, -1.f);
}

// X = (I + L)^-1: diagonal tiles, then the tiles below them, diagonal by diagonal.  All threads.
__device__ __forceinline__ void invert(const float* L, float* X) {
  const int warp = static_cast<int>(threadIdx.x) / 32, tile = warp * (kSquareStride + 1) * kTileRows;
  if (warp < kTiles) invert_tile(L + tile, X + tile);
  __syncthreads();
#pragma unroll
  for (int below = 1; below < kTiles; ++below) {
    if (warp + below < kTiles) merge_tile(L, X, warp + below, warp);
    __syncthreads();
  }
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_solve(const float* X, __half* to) {
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x); at < kChunk * kChunk / 8; at += kLocalThreads) {
    const int row = at / 8, c = at % 8 * 8;
    if (c / kTileRows > row / kTileRows) continue;
    const float* x = X + row * kSquareStride + c;
    const uint4 packed = {pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])};
    *reinterpret_cast<uint4*>(to + row * kChunk + c) = packed;
  }
}

template <int D>
__global__ void __launch_bounds__(kLocalThreads, 2) prepare_kernel(Tokens in, Prepared out, float q_factor) {
  Shared<D>& s = *reinterpret_cast<Shared<D>*>(shared_memory());
  const int64_t chain = blockIdx.x / in.chunks;
  const Place p = place_of(in, chain, blockIdx.x - chain * in.chunks);
  load_tokens(in, p, s);
  row_scales<D>(s.q, q_factor, s.q_scale);
  row_scales<D>(s.k, 1.f, s.k_scale);
  running_decays<D>(in, p, s.gate, s.G, s.sums);
  store_rows(p, s, out);
  const float offset = anchor_offset(in.bound);
  for_tile_pairs(
      static_cast<int>(threadIdx.x) / 32,
      [&](int I) { store_scores(p, s, out, I, I, tile_scores<D, true>(s, I, I, offset)); },
      [&](int I, int J) { store_scores(p, s, out, I, J, tile_scores<D, false>(s, I, J, offset)); });
  __syncthreads();
  invert(s.Akk, s.solve);
  store_solve(s.solve, out.solve + p.index * kElements);
}

template <int D>
void launch_prepare(cudaStream_t stream, int64_t chains, const Tokens& in, const Prepared& out) {
  launch(prepare_kernel<D>, dim3(static_cast<unsigned>(chains * in.chunks)), kLocalThreads, sizeof(Shared<D>), stream,
         in, out, 1.f / sqrtf(static_cast<float>(D)));
}

}  // namespace

void prepare(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& out) {
  D == 64 ? launch_prepare<64>(stream, chains, in, out) : launch_prepare<128>(stream, chains, in, out);
}

}  // namespace kestrel::cuda::kda
