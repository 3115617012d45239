// The chunked form on tensor cores: what its kernels share.
//
// A chunk is 64 tokens of a row in four tiles of 16, on a grid fixed to the row's start.  A document may begin inside a
// chunk: nothing is cut there, the factors that would carry anything across the border are zero instead:
//   pairs (i, j) of two documents in Aqk and Akk;
//   k_in, q_in of tokens behind the first border (the entering state is not theirs);
//   k_out of tokens before the last border, and the decay of the chunk as a whole (nothing of theirs leaves).
// Everything downstream, both scans and the solve included, is then right without knowing of documents.
//
// With G_i the running sum of log2 decays from the chunk's first token to token i (inclusive) and G_last at its end:
//   k_in_i = k_i 2^G_i      q_in_i = K^-1/2 q_i 2^G_i      k_out_j = k_j 2^(G_last - G_j)      (normalised q and k)
//   Aqk_ij = K^-1/2 <q_i, k_j 2^(G_i - G_j)> (j <= i)      Akk_ij = <k_i, k_j 2^(G_i - G_j)> (j < i)
//   A = (I + diag(beta) Akk)^-1
// and per chunk, from the entering state S [K,V] to the leaving one S':
//   U = A diag(beta) (V - K_in S)      O = Q_in S + Aqk U      S' = diag(2^G_last) S + K_out^T U
//
// Forward:  prepare (every chunk by itself: k_in, q_in, k_out, A, Aqk), then scan (a chain's chunks in order).
// Backward: prepare again, scan_backward (dV, and the gradient of every chunk's leaving state), local_backward (every
// chunk by itself: dq, dk, d gate, d beta), then the parameters' gradients are summed.
//
// Decays of a pair meet in one product of two factors around an anchor: 2^(G_i - G_first + a) on the row (later) token
// and 2^(G_first - a - G_j) on the column (earlier) token, G_first that of the row tile's first token and a half of the
// largest decay 16 tokens can have.  Both lie within 2^+-64, both are known when the row tile begins: no later token is
// looked at, so a prefix gives the same bits whatever follows it.  Above the diagonal the product may be as large as
// 2^128; it is dropped by a select, never multiplied away.
#pragma once

#include "kernels/core/cuda.cuh"
#include "kernels/kda/kda.h"
#include "kernels/kda/kda_mma.cuh"

namespace kestrel::cuda::kda {

constexpr int kChunk = 64;
constexpr int kTileRows = 16;
constexpr int kTiles = kChunk / kTileRows;
constexpr int kLocalThreads = 256;  // blocks of prepare and local_backward

// Inputs, as all kernels see them.  Row r = b T + t; head h of a row begins at column h * width.
struct Tokens {
  int64_t T, H, chunks;  // chunks of a row
  const bf16_t *q, *k, *v, *gate, *beta;
  int64_t q_ld, k_ld, v_ld, gate_ld, beta_ld;
  const float *A_log, *dt_bias;
  const int32_t* document_start;  // or null
  float bound;
};

// What prepare leaves, per chunk: entry (b H + h) chunks + c.
struct Prepared {
  bf16_t *k_in, *q_in, *k_out;  // [64,K]
  __half* solve;                // [64,64] A; tiles above the diagonal are not written
  bf16_t* scores;               // [64,64] Aqk, likewise
  float* decay;                 // [K] 2^G_last, or zero
  float* beta;                  // [64]
};

// Where a chunk lies.
struct Place {
  int64_t index;  // of Prepared
  int64_t row;    // first row of the tensors [B*T, ...]
  int64_t begin;  // first token in its row of the batch
  int64_t h;
  int length;  // tokens, at most 64
};
__device__ __forceinline__ Place place_of(const Tokens& in, int64_t chain, int64_t chunk) {
  Place p;
  p.index = chain * in.chunks + chunk;
  p.begin = chunk * kChunk;
  p.row = chain / in.H * in.T + p.begin;
  p.h = chain % in.H;
  const int64_t left = in.T - p.begin;
  p.length = left < kChunk ? static_cast<int>(left) : kChunk;
  return p;
}

// ---------------------------------------------------------------- tiles of 16-bit elements in shared memory

// Rows of kCols elements in units of 16 bytes; unit u of row r lies at place u ^ (r % 8), so that the eight rows of an
// ldmatrix tile fall into different banks.
template <int kCols>
__device__ __forceinline__ int unit_at(int row, int unit) {
  static_assert(kCols >= 64);
  return row * kCols + ((unit ^ (row & 7)) << 3);
}

__device__ __forceinline__ int lane_id() {
  return static_cast<int>(threadIdx.x) & 31;
}

// Where a lane's row of an ldmatrix begins in the 16x16 block (row16, column16) of a tile.  The four 8x8 tiles of the
// block come in the order (0,0) (8,0) (0,8) (8,8) as (row, column), or with rows and columns changed over.
template <int kCols, bool rows_first>
__device__ __forceinline__ const uint16_t* block_row(const void* tile, int row16, int column16) {
  const int lane = lane_id();
  const int row = rows_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3),
            unit = rows_first ? lane >> 4 : (lane >> 3) & 1;
  return static_cast<const uint16_t*>(tile) + (unit_at<kCols>(row, unit) ^ (column16 << 4)) + row16 * 16 * kCols;
}

// A[m][k], 16x16 at (m16, k16), rows of the tile are m / are k.
template <int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const void* tile, int m16, int k16) {
  ldmatrix_x4(a, block_row<kCols, true>(tile, m16, k16));
}
template <int kCols>
__device__ __forceinline__ void load_a_from_k_rows(uint32_t (&a)[4], const void* tile, int m16, int k16) {
  ldmatrix_x4_trans(a, block_row<kCols, false>(tile, k16, m16));
}
// B[k][n], 16x16 at (k16, n16) as two products' operands {b[0], b[1]} and {b[2], b[3]}; rows of the tile are n / are k.
template <int kCols>
__device__ __forceinline__ void load_b_from_n_rows(uint32_t (&b)[4], const void* tile, int k16, int n16) {
  ldmatrix_x4(b, block_row<kCols, false>(tile, n16, k16));
}
template <int kCols>
__device__ __forceinline__ void load_b_from_k_rows(uint32_t (&b)[4], const void* tile, int k16, int n16) {
  ldmatrix_x4_trans(b, block_row<kCols, true>(tile, k16, n16));
}

// d[0], d[1] (16 columns) += a b.
__device__ __forceinline__ void mma_pair(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
  mma_16x8x16(d0, a, b0);
  mma_16x8x16(d1, a, b1);
}

// The sums of two neighbouring 16x8 products, rounded, as an operand A[16][16] of the next one.
__device__ __forceinline__ void as_operand(uint32_t (&a)[4], const float (&d0)[4], const float (&d1)[4]) {
  a[0] = pack_bf16(d0[0], d0[1]);
  a[1] = pack_bf16(d0[2], d0[3]);
  a[2] = pack_bf16(d1[0], d1[1]);
  a[3] = pack_bf16(d1[2], d1[3]);
}

// x = high + low: two fp16 numbers as two bf16 numbers each (11 bits = 8 + the rest, exactly, within bf16's range).
__device__ __forceinline__ void split_f16(uint32_t x, uint32_t& high, uint32_t& low) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&x));
  high = pack_bf16(f.x, f.y);
  low = pack_bf16(f.x - __uint_as_float(high << 16), f.y - __uint_as_float(high & 0xffff0000u));
}
__device__ __forceinline__ void split_f16(const uint32_t (&x)[4], uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split_f16(x[i], high[i], low[i]);
}

// kRows rows of global memory on their way into a tile; rows from `valid` on become zero.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void fetch_tile(void* tile, const void* rows, int64_t ld, int valid = kRows) {
  constexpr int kUnits = kCols / 8, kStep = kThreads / kUnits;  // rows a pass takes
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);          // every pass has the same swizzle
  const int row0 = static_cast<int>(threadIdx.x) / kUnits, unit = static_cast<int>(threadIdx.x) % kUnits;
  uint16_t* to = static_cast<uint16_t*>(tile) + unit_at<kCols>(row0, unit);
  const uint16_t* from = static_cast<const uint16_t*>(rows) + unit * 8;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int row = row0 + i * kStep;
    const bool there = row < valid;
    copy16_async(to + i * kStep * kCols, from + (there ? row : 0) * ld, there);
  }
}

__device__ __forceinline__ float2 bf16_pair(const bf16_t* p) {
  const uint32_t x = *reinterpret_cast<const uint32_t*>(p);
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// ---------------------------------------------------------------- a chunk's tokens in shared memory

// Plain rows padded by 16 bytes, so that a column of eight rows falls into different banks.
template <int D>
constexpr int kRowStride = D + 8;  // bf16
template <int D>
constexpr int kDecayStride = D + 4;        // float
constexpr int kSquareStride = kChunk + 4;  // float

template <int D>
__device__ __forceinline__ void fetch_rows(bf16_t* to, const bf16_t* rows, int64_t ld, int valid) {
  constexpr int kUnits = D / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kUnits / kLocalThreads; ++i) {
    const int at = i * kLocalThreads + static_cast<int>(threadIdx.x), row = at / kUnits, unit = at % kUnits;
    const bool there = row < valid;
    copy16_async(to + row * kRowStride<D> + unit * 8, rows + (there ? row : 0) * ld + unit * 8, there);
  }
}

// first[i]: the first token of the chunk that token i sees, or -1: it sees all of them and the entering state.
__device__ __forceinline__ int first_visible(const Tokens& in, const Place& p, int i) {
  if (i >= p.length) return i;
  if (in.document_start == nullptr) return -1;
  const int64_t start = in.document_start[p.row + i];
  return start == 0 || start < p.begin ? -1 : static_cast<int>(start - p.begin);
}

// scale[i] = factor / |row i|.  A warp per eight rows.
template <int D>
__device__ __forceinline__ void row_scales(const bf16_t* rows, float factor, float* scale) {
  constexpr int kPerLane = D / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_id();
#pragma unroll
  for (int i = 0; i < kChunk / (kLocalThreads / 32); ++i) {
    const int row = warp * (kChunk / (kLocalThreads / 32)) + i;
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kPerLane; e += 2) {
      const float2 x = bf16_pair(rows + row * kRowStride<D> + lane * kPerLane + e);
      sum += x.x * x.x + x.y * x.y;
    }
    sum = warp_sum(sum);
    if (lane == 0) scale[row] = factor * rsqrtf(sum + 1e-6f);
  }
}

// A thread's share of the work that walks down the chunk channel by channel: two channels, kRows rows.
template <int D>
struct ChannelWalk {
  static constexpr int kPairs = D / 2;
  static constexpr int kGroups = kLocalThreads / kPairs;
  static constexpr int kRows = kChunk / kGroups;
  int channel, group;
  __device__ ChannelWalk() {
    channel = static_cast<int>(threadIdx.x) % kPairs * 2;
    group = static_cast<int>(threadIdx.x) / kPairs;
  }
  __device__ int row(int r) const { return group * kRows + r; }
};

struct GateRates {
  float rate, bound;
  float2 bias;
};
__device__ __forceinline__ GateRates gate_rates(const Tokens& in, const Place& p, int D, int channel) {
  // exp(A_log) stays finite, so that zero times it is zero where the gate is saturated.
  return {expf(fminf(in.A_log[p.h], 80.f)), in.bound, *reinterpret_cast<const float2*>(in.dt_bias + p.h * D + channel)};
}

// G from the gate logits x [64][kRowStride].  All threads; `sums` [kGroups][D] is scratch.  Ends with a barrier.
template <int D>
__device__ __forceinline__ void running_decays(const Tokens& in, const Place& p, const bf16_t* x, float* G,
                                               float* sums) {
  const ChannelWalk<D> walk;
  const GateRates gate = gate_rates(in, p, D, walk.channel);
  const float step = gate.bound * kLog2e, rate = -gate.rate * kLog2e;
  float2 local[ChannelWalk<D>::kRows], run = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < ChannelWalk<D>::kRows; ++r) {
    const float2 logit = bf16_pair(x + walk.row(r) * kRowStride<D> + walk.channel);
    const bool there = walk.row(r) < p.length;
    const float a = step * reciprocal(1.f + exp2_fast(rate * (logit.x + gate.bias.x)));
    const float b = step * reciprocal(1.f + exp2_fast(rate * (logit.y + gate.bias.y)));
    run.x += there ? a : 0.f;
    run.y += there ? b : 0.f;
    local[r] = run;
  }
  *reinterpret_cast<float2*>(sums + walk.group * D + walk.channel) = run;
  __syncthreads();
  float2 before = {0.f, 0.f};
  for (int group = 0; group < walk.group; ++group) {
    const float2 sum = *reinterpret_cast<const float2*>(sums + group * D + walk.channel);
    before.x += sum.x;
    before.y += sum.y;
  }
#pragma unroll
  for (int r = 0; r < ChannelWalk<D>::kRows; ++r) {
    *reinterpret_cast<float2*>(G + walk.row(r) * kDecayStride<D> + walk.channel) = {before.x + local[r].x,
                                                                                    before.y + local[r].y};
  }
  __syncthreads();
}

// Half of the log2 decay that 15 tokens can have: the anchor's distance from a tile's first token.
__device__ __forceinline__ float anchor_offset(float bound) {
  return -7.5f * kLog2e * bound;
}

// f(row tile, column tile) for the ten tile pairs on and below the diagonal, dealt to eight warps: each of warps 0-3
// has a diagonal one, 4 and 5 have two others, 6 and 7 one.
template <class Diagonal, class Below>
__device__ __forceinline__ void for_tile_pairs(int warp, const Diagonal& diagonal, const Below& below) {
  if (warp < kTiles) {
    diagonal(warp);
    return;
  }
  const int begin = warp == 4 ? 0 : warp == 5 ? 2 : warp - 2, end = warp == 4 ? 2 : warp == 5 ? 4 : warp - 1;
  for (int i = begin; i < end; ++i) {  // (1,0) (2,0) (3,0) (2,1) (3,1) (3,2)
    below(i == 0 ? 1 : i == 1 || i == 3 ? 2 : 3, i < 3 ? 0 : i < 5 ? 1 : 2);
  }
}

// ---------------------------------------------------------------- launchers

void prepare(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& out);

struct Scan {
  bf16_t* o;
  int64_t o_ld;
  const float* initial_state;  // [B,H,K,V] or null: zero
  float* final_state;          // or null
  bf16_t* saved;               // [B,H,chunks,V,K] or null
};
void scan(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready, const Scan& a);

struct ScanBackward {
  const bf16_t* d_o;
  bf16_t* dv;
  int64_t d_o_ld, dv_ld;
  const float* d_final_state;  // or null: zero
  float* d_initial_state;      // or null
  bf16_t* d_states;            // [B,H,chunks,V,K] gradient of each chunk's leaving state
};
void scan_backward(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready,
                   const ScanBackward& a);

struct LocalBackward {
  const bf16_t *d_o, *dv, *states, *d_states;
  bf16_t *dq, *dk, *dgate, *dbeta;
  int64_t d_o_ld, dv_ld, dq_ld, dk_ld, dgate_ld, dbeta_ld;
  float *d_bias, *d_A_log;  // [chains, chunks, K] and [chains, chunks]: each chunk's share
};
void local_backward(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready,
                    const LocalBackward& a);

// dA_log [H] and ddt_bias [H*K] += the shares of all chunks of all rows of the batch, in order.
void add_parameter_grads(cudaStream_t stream, const KdaDims& d, int64_t chunks, const float* d_bias,
                         const float* d_A_log, float* ddt_bias, float* dA_log);

}  // namespace kestrel::cuda::kda
