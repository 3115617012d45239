// The chunk-parallel part of the backward pass: dq, dk, d gate, d beta of a chunk from the state that entered it, the
// gradient of the state that left it, dO and dV.
//
// With E = V - K_in S - Akk U (so that U = diag(beta) E and dE = dV), rows i and columns j of a pair, all per head:
//   dAqk_ij = <dO_i, U_j> (j <= i)          dAkk_ij = -<dV_i, U_j> (j < i)
//   dq_i = 2^G_i S dO_i + sum_{j<i} dAqk_ij k_j 2^(G_i-G_j) + dAqk_ii k_i
//   row_i = -2^G_i S dV_i + sum_{j<i} dAkk_ij k_j 2^(G_i-G_j)
//   col_j = 2^(G_last-G_j) dS' U_j + sum_{i>j} (dAqk_ij q_i + dAkk_ij k_i) 2^(G_i-G_j)
//   dk = row + col + dAqk_ii q_i
//   dG_i = q_i (dq_i without the pair (i,i)) + k_i (row_i - col_i);  at the chunk's end also what the decay of the
//   whole
//          chunk gets: 2^G_last rowsum(S . dS') + sum_j k_j (the first part of col_j)
//   dg = dG summed from the end of the token's document backwards;  d beta logit_i = <dV_i, U_i> (1 - beta_i) / beta_i
// q stands for K^-1/2 q / |q|, k for k / |k|.  A token's pair with itself, and the last token's own write, have no
// decay in them and stay out of dG.
//
// One block of eight warps per chunk and head; a warp owns the 16 rows of a tile and half of the channels, with dq, row
// and col as sums of its products.  Products with the states in bf16, pairs in tf32.
// Bytes per token and head at K = V = 128: 3.1 KB read, 0.8 KB written.  FLOPs: 8 K V + 64 (6 V + 5 K).  Bound by
// memory; the exponentials (about 11 per channel and token) are close behind.
#include "kernels/kda/kda_chunk.cuh"
#include "kernels/kda/kda_launch.cuh"

namespace kestrel::cuda::kda {
namespace {

constexpr int kSquare = kChunk * kChunk;
constexpr int kWarps = kLocalThreads / 32;
constexpr int kHalves = kWarps / kTiles;

template <int D>
struct Shared {
  union {
    struct {
      bf16_t S[D * D];  // [V,K] swizzled
      union {
        bf16_t dS[D * D];  // [V,K] swizzled, once U is known
        struct {
          bf16_t gate[kChunk * kRowStride<D>];
          __half solve[kSquare];  // swizzled
        };
      };
    };
    float dG[kChunk * kDecayStride<D>];  // at the end
  };
  union {
    struct {
      bf16_t k_in[kChunk * D], v[kChunk * D];  // swizzled; v becomes diag(beta) (V - K_in S)
    };
    struct {
      float dAqk[kChunk * kSquareStride], dAkk[kChunk * kSquareStride];  // strictly below the diagonal, else zero
    };
  };
  bf16_t d_o[kChunk * D], dv[kChunk * D], u[kChunk * D];  // swizzled; d_o and dv at the end hold dq and dk
  bf16_t q[kChunk * kRowStride<D>], k[kChunk * kRowStride<D>];
  float G[kChunk * kDecayStride<D>];
  float sums[ChannelWalk<D>::kGroups * D];       // of walks
  float state_sum[ChannelWalk<D>::kGroups * D];  // shares of rowsum(S . dS')
  float write_sum[kTiles * D];                   // shares of sum_j k_j (first part of col_j)
  float q_scale[kChunk], k_scale[kChunk], beta[kChunk], rest_over_beta[kChunk];
  float own[kChunk];  // dAqk_ii
  float q_dot[kHalves][kChunk], k_dot[kHalves][kChunk];
  float block[kWarps];
  int first[kChunk];
  int group_restarts[ChannelWalk<D>::kGroups];
};
static_assert(sizeof(Shared<128>) <= 227 * 1024);

// A lane's place in its warp's [16 rows, D / 2 channels] of sums: rows g, g + 8; channels c, c + 1 of n-tile n.
template <int D>
struct Mine {
  static constexpr int kN = D / 16;  // n-tiles
  int tile, half, g, t;
  __device__ Mine() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_id();
    tile = warp % kTiles, half = warp / kTiles, g = lane >> 2, t = lane & 3;
  }
  __device__ int row(int upper) const { return tile * kTileRows + g + upper * 8; }
  __device__ int channel(int n) const { return half * (D / 2) + n * 8 + t * 2; }  // of a sum
  __device__ int column(int n) const { return half * (D / 2) + n * 8 + g; }       // of a right operand
};

template <int D>
using Sums = float[D / 16][4];

template <int D>
__device__ __forceinline__ void load(const Tokens& in, const Prepared& ready, const LocalBackward& a, const Place& p,
                                     Shared<D>& s) {
  fetch_rows<D>(s.gate, in.gate + p.row * in.gate_ld + p.h * D, in.gate_ld, p.length);
  fetch_rows<D>(s.q, in.q + p.row * in.q_ld + p.h * D, in.q_ld, p.length);
  fetch_rows<D>(s.k, in.k + p.row * in.k_ld + p.h * D, in.k_ld, p.length);
  commit_copies();
  fetch_tile<kChunk, D, kLocalThreads>(s.k_in, ready.k_in + p.index * kChunk * D, D);
  fetch_tile<D, D, kLocalThreads>(s.S, a.states + p.index * D * D, D);
  fetch_tile<kChunk, D, kLocalThreads>(s.v, in.v + p.row * in.v_ld + p.h * D, in.v_ld, p.length);
  fetch_tile<kChunk, kChunk, kLocalThreads>(s.solve, ready.solve + p.index * kSquare, kChunk);
  fetch_tile<kChunk, D, kLocalThreads>(s.d_o, a.d_o + p.row * a.d_o_ld + p.h * D, a.d_o_ld, p.length);
  fetch_tile<kChunk, D, kLocalThreads>(s.dv, a.dv + p.row * a.dv_ld + p.h * D, a.dv_ld, p.length);
  commit_copies();
  const int i = static_cast<int>(threadIdx.x);
  if (i < kChunk) {
    const float logit = i < p.length ? to_float(in.beta[(p.row + i) * in.beta_ld + p.h]) : 0.f;
    s.beta[i] = i < p.length ? sigmoid(logit) : 0.f;
    // (1 - beta) / beta; where it would overflow, dV and U are zero.
    s.rest_over_beta[i] = exp_fast(fminf(-logit, 80.f));
    s.first[i] = first_visible(in, p, i);
  }
  wait_copies<1>();
  __syncthreads();
}

// v <- diag(beta) (V - K_in S), rounded as the forward scan rounds it.
template <int D>
__device__ __forceinline__ void residual(const Mine<D>& me, Shared<D>& s) {
  Sums<D> x = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    load_a<D>(a, s.k_in, me.tile, k);
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      uint32_t b[4];
      load_b_from_n_rows<D>(b, s.S, k, me.half * (D / 32) + n);
      mma_pair(x[2 * n], x[2 * n + 1], a, b);
    }
  }
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = me.row(upper);
      bf16_t* at = s.v + unit_at<D>(row, me.half * (D / 16) + n) + me.t * 2;
      const float2 v = bf16_pair(at);
      const float beta = s.beta[row];
      *reinterpret_cast<uint32_t*>(at) = pack_bf16(beta * (v.x - x[n][upper * 2]), beta * (v.y - x[n][upper * 2 + 1]));
    }
  }
}

// u = A v.
template <int D>
__device__ __forceinline__ void written(const Mine<D>& me, Shared<D>& s) {
  Sums<D> x = {};
  for (int k = 0; k <= me.tile; ++k) {
    uint32_t a[4], high[4], low[4];
    load_a<kChunk>(a, s.solve, me.tile, k);
    split_f16(a, high, low);
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      uint32_t b[4];
      load_b_from_k_rows<D>(b, s.v, k, me.half * (D / 32) + n);
      mma_pair(x[2 * n], x[2 * n + 1], low, b);
      mma_pair(x[2 * n], x[2 * n + 1], high, b);
    }
  }
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      *reinterpret_cast<uint32_t*>(s.u + unit_at<D>(me.row(upper), me.half * (D / 16) + n) + me.t * 2) =
          pack_bf16(x[n][upper * 2], x[n][upper * 2 + 1]);
    }
  }
}

// dAqk and dAkk of one tile pair, d beta from the diagonal of dV U^T.
template <int D>
__device__ __forceinline__ void d_scores(const Place& p, const LocalBackward& a, Shared<D>& s, int I, int J) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
  float qk[2][4] = {}, kk[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t d_o[4], dv[4], u[4];
    load_a<D>(d_o, s.d_o, I, k);
    load_a<D>(dv, s.dv, I, k);
    load_b_from_n_rows<D>(u, s.u, k, J);
    mma_pair(qk[0], qk[1], d_o, u);
    mma_pair(kk[0], kk[1], dv, u);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = I * kTileRows + g + (e >> 1) * 8, j = J * kTileRows + n * 8 + t * 2 + (e & 1);
      const bool pair = j < i && j >= s.first[i];
      s.dAqk[i * kSquareStride + j] = pair ? qk[n][e] : 0.f;
      s.dAkk[i * kSquareStride + j] = pair ? -kk[n][e] : 0.f;
      if (i != j) continue;
      s.own[i] = qk[n][e];
      if (i < p.length) {
        a.dbeta[(p.row + i) * a.dbeta_ld + p.h] = from_float<bf16_t>(kk[n][e] * s.rest_over_beta[i]);
      }
    }
  }
}

// dq, row += dO S^T, -dV S^T;  col += U dS'^T  (S and dS' are kept transposed: [V,K]).
template <int D>
__device__ __forceinline__ void state_products(const Mine<D>& me, const Shared<D>& s, Sums<D>& dq, Sums<D>& row,
                                               Sums<D>& col) {
#pragma unroll 2
  for (int k = 0; k < D / 16; ++k) {
    uint32_t d_o[4], dv[4], u[4];
    load_a<D>(d_o, s.d_o, me.tile, k);
    load_a<D>(dv, s.dv, me.tile, k);
    load_a<D>(u, s.u, me.tile, k);
#pragma unroll
    for (int i = 0; i < 4; ++i) dv[i] ^= 0x80008000u;  // both signs
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      uint32_t b[4];
      load_b_from_k_rows<D>(b, s.S, k, me.half * (D / 32) + n);
      mma_pair(dq[2 * n], dq[2 * n + 1], d_o, b);
      mma_pair(row[2 * n], row[2 * n + 1], dv, b);
      load_b_from_k_rows<D>(b, s.dS, k, me.half * (D / 32) + n);
      mma_pair(col[2 * n], col[2 * n + 1], u, b);
    }
  }
}

// This thread's share of rowsum(S . dS') per channel.
template <int D>
__device__ __forceinline__ void state_sum(Shared<D>& s) {
  const ChannelWalk<D> walk;
  constexpr int kValues = D / ChannelWalk<D>::kGroups;
  float2 sum = {0.f, 0.f};
#pragma unroll 8
  for (int i = 0; i < kValues; ++i) {
    const int at = unit_at<D>(walk.group * kValues + i, walk.channel / 8) + walk.channel % 8;
    const float2 x = bf16_pair(s.S + at), y = bf16_pair(s.dS + at);
    sum.x += x.x * y.x;
    sum.y += x.y * y.y;
  }
  *reinterpret_cast<float2*>(s.state_sum + walk.group * D + walk.channel) = sum;
}

template <int D>
__device__ __forceinline__ float2 decay_at(const Shared<D>& s, int row, int channel) {
  return *reinterpret_cast<const float2*>(s.G + row * kDecayStride<D> + channel);
}
template <int D>
__device__ __forceinline__ float2 query_at(const Shared<D>& s, int row, int channel) {
  const float2 x = bf16_pair(s.q + row * kRowStride<D> + channel);
  return {x.x * s.q_scale[row], x.y * s.q_scale[row]};
}
template <int D>
__device__ __forceinline__ float2 key_at(const Shared<D>& s, int row, int channel) {
  const float2 x = bf16_pair(s.k + row * kRowStride<D> + channel);
  return {x.x * s.k_scale[row], x.y * s.k_scale[row]};
}

// Pairs with this warp's tile as rows: dq, row <- rise (fall(entry) (dq, row) + sum_j dA_ij k_j fall_j), with the
// anchor at this tile's first token.
template <int D>
__device__ __forceinline__ void pairs_as_rows(const Mine<D>& me, const Shared<D>& s, float offset, Sums<D>& dq,
                                              Sums<D>& row) {
  const int first_row = me.tile * kTileRows;
  const bool entered[2] = {s.first[me.row(0)] < 0, s.first[me.row(1)] < 0};
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
    const float2 anchor = decay_at(s, first_row, me.channel(n));
    const float entry[2] = {exp2_fast(anchor.x - offset), exp2_fast(anchor.y - offset)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dq[n][e] = entered[e >> 1] ? dq[n][e] * entry[e & 1] : 0.f;
      row[n][e] = entered[e >> 1] ? row[n][e] * entry[e & 1] : 0.f;
    }
  }
  for (int j = 0; j < first_row + kTileRows; j += 8) {
    // Of eight columns, k = t is column 2 t and k = t + 4 the next.
    const int at0 = me.row(0) * kSquareStride + j + me.t * 2, at1 = at0 + 8 * kSquareStride;
    const float2 q0 = *reinterpret_cast<const float2*>(s.dAqk + at0),
                 q1 = *reinterpret_cast<const float2*>(s.dAqk + at1);
    const float2 k0 = *reinterpret_cast<const float2*>(s.dAkk + at0),
                 k1 = *reinterpret_cast<const float2*>(s.dAkk + at1);
    const uint32_t d_qk[4] = {to_tf32(q0.x), to_tf32(q1.x), to_tf32(q0.y), to_tf32(q1.y)};
    const uint32_t d_kk[4] = {to_tf32(k0.x), to_tf32(k1.x), to_tf32(k0.y), to_tf32(k1.y)};
    const int j0 = j + me.t * 2, j1 = j0 + 1;
    const float scale0 = s.k_scale[j0], scale1 = s.k_scale[j1];
#pragma unroll
    for (int n = 0; n < Mine<D>::kN; ++n) {
      const int c = me.column(n);
      const float anchor = s.G[first_row * kDecayStride<D> + c] - offset;
      const float fall0 = exp2_fast(anchor - s.G[j0 * kDecayStride<D> + c]);
      const float fall1 = exp2_fast(anchor - s.G[j1 * kDecayStride<D> + c]);
      const uint32_t key[2] = {to_tf32(to_float(s.k[j0 * kRowStride<D> + c]) * scale0 * fall0),
                               to_tf32(to_float(s.k[j1 * kRowStride<D> + c]) * scale1 * fall1)};
      mma_16x8x8(dq[n], d_qk, key);
      mma_16x8x8(row[n], d_kk, key);
    }
  }
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
    const float2 anchor = decay_at(s, first_row, me.channel(n));
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float2 G = decay_at(s, me.row(upper), me.channel(n));
      const float rise[2] = {exp2_fast(G.x - anchor.x + offset), exp2_fast(G.y - anchor.y + offset)};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        dq[n][upper * 2 + e] *= rise[e];
        row[n][upper * 2 + e] *= rise[e];
      }
    }
  }
}

// col <- 2^(G_last - G_j) col, and the tile's share of sum_j k_j col_j for the decay of the whole chunk.
template <int D>
__device__ __forceinline__ void write_gradients(const Mine<D>& me, const Place& p, Shared<D>& s, Sums<D>& col) {
  const int last = p.length - 1, border = s.first[last];
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
    const float2 end = decay_at(s, kChunk - 1, me.channel(n));
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = me.row(upper);
      const float2 G = decay_at(s, row, me.channel(n)), k = key_at(s, row, me.channel(n));
      float &x = col[n][upper * 2], &y = col[n][upper * 2 + 1];
      x = row >= border ? x * exp2_fast(end.x - G.x) : 0.f;
      y = row >= border ? y * exp2_fast(end.y - G.y) : 0.f;
      if (row == last) continue;
      sum.x += k.x * x;
      sum.y += k.y * y;
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {  // over the eight lanes of a channel
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, mask);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, mask);
    }
    if (me.g == 0) *reinterpret_cast<float2*>(s.write_sum + me.tile * D + me.channel(n)) = sum;
  }
}

// Pairs with this warp's tile as columns: col_j += fall_j sum_i (dAqk_ij q_i + dAkk_ij k_i) rise_i, an anchor per row
// tile.
template <int D>
__device__ __forceinline__ void pairs_as_columns(const Mine<D>& me, const Shared<D>& s, float offset, Sums<D>& col) {
  for (int I = me.tile; I < kTiles; ++I) {
    const int first_row = I * kTileRows;
    Sums<D> x = {};
#pragma unroll
    for (int i = first_row; i < first_row + kTileRows; i += 8) {
      const int i0 = i + me.t * 2, i1 = i0 + 1;  // k = t and k = t + 4
      const int at0 = i0 * kSquareStride + me.row(0), at1 = i1 * kSquareStride + me.row(0);
      const uint32_t d_qk[4] = {to_tf32(s.dAqk[at0]), to_tf32(s.dAqk[at0 + 8]), to_tf32(s.dAqk[at1]),
                                to_tf32(s.dAqk[at1 + 8])};
      const uint32_t d_kk[4] = {to_tf32(s.dAkk[at0]), to_tf32(s.dAkk[at0 + 8]), to_tf32(s.dAkk[at1]),
                                to_tf32(s.dAkk[at1 + 8])};
      const float q_scale0 = s.q_scale[i0], q_scale1 = s.q_scale[i1];
      const float k_scale0 = s.k_scale[i0], k_scale1 = s.k_scale[i1];
#pragma unroll
      for (int n = 0; n < Mine<D>::kN; ++n) {
        const int c = me.column(n);
        const float anchor = s.G[first_row * kDecayStride<D> + c] - offset;
        const float rise0 = exp2_fast(s.G[i0 * kDecayStride<D> + c] - anchor);
        const float rise1 = exp2_fast(s.G[i1 * kDecayStride<D> + c] - anchor);
        const uint32_t query[2] = {to_tf32(to_float(s.q[i0 * kRowStride<D> + c]) * q_scale0 * rise0),
                                   to_tf32(to_float(s.q[i1 * kRowStride<D> + c]) * q_scale1 * rise1)};
        const uint32_t key[2] = {to_tf32(to_float(s.k[i0 * kRowStride<D> + c]) * k_scale0 * rise0),
                                 to_tf32(to_float(s.k[i1 * kRowStride<D> + c]) * k_scale1 * rise1)};
        mma_16x8x8(x[n], d_qk, query);
        mma_16x8x8(x[n], d_kk, key);
      }
    }
#pragma unroll
    for (int n = 0; n < Mine<D>::kN; ++n) {
      const float2 anchor = decay_at(s, first_row, me.channel(n));
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float2 G = decay_at(s, me.row(upper), me.channel(n));
        col[n][upper * 2] += x[n][upper * 2] * exp2_fast(anchor.x - offset - G.x);
        col[n][upper * 2 + 1] += x[n][upper * 2 + 1] * exp2_fast(anchor.y - offset - G.y);
      }
    }
  }
}

// dG to shared memory; then dq and dk are complete (row becomes dk), and their products with the raw rows are summed.
template <int D>
__device__ __forceinline__ void decay_gradients(const Mine<D>& me, const Place& p, Shared<D>& s, Sums<D>& dq,
                                                Sums<D>& row, const Sums<D>& col) {
  float q_dot[2] = {0.f, 0.f}, k_dot[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < Mine<D>::kN; ++n) {
    const int c = me.channel(n);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int i = me.row(upper), e = upper * 2;
      const float2 q = query_at(s, i, c), k = key_at(s, i, c);
      const float write = i == p.length - 1 ? 0.f : 1.f, own = s.own[i];
      const float2 dG = {q.x * dq[n][e] + k.x * (row[n][e] - write * col[n][e]),
                         q.y * dq[n][e + 1] + k.y * (row[n][e + 1] - write * col[n][e + 1])};
      *reinterpret_cast<float2*>(s.dG + i * kDecayStride<D> + c) = dG;
      dq[n][e] += own * k.x;
      dq[n][e + 1] += own * k.y;
      row[n][e] += col[n][e] + own * q.x;
      row[n][e + 1] += col[n][e + 1] + own * q.y;
      const float2 raw_q = bf16_pair(s.q + i * kRowStride<D> + c), raw_k = bf16_pair(s.k + i * kRowStride<D> + c);
      q_dot[upper] += raw_q.x * dq[n][e] + raw_q.y * dq[n][e + 1];
      k_dot[upper] += raw_k.x * row[n][e] + raw_k.y * row[n][e + 1];
    }
  }
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {  // over the four lanes of a row
      q_dot[upper] += __shfl_xor_sync(0xffffffffu, q_dot[upper], mask);
      k_dot[upper] += __shfl_xor_sync(0xffffffffu, k_dot[upper], mask);
    }
    if (me.t == 0) {
      s.q_dot[me.half][me.row(upper)] = q_dot[upper];
      s.k_dot[me.half][me.row(upper)] = k_dot[upper];
    }
  }
}

// Back through the norms, from the raw rows:  dx = scale (dy - x <x, dy> / |x|^2);  rounded, into d_o and dv.
template <int D>
__device__ __forceinline__ void norm_gradients(const Mine<D>& me, Shared<D>& s, const Sums<D>& dq, const Sums<D>& dk) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int i = me.row(upper), e = upper * 2;
    const float q_scale = s.q_scale[i], k_scale = s.k_scale[i];
    const float q_along = (s.q_dot[0][i] + s.q_dot[1][i]) * q_scale * q_scale * static_cast<float>(D);
    const float k_along = (s.k_dot[0][i] + s.k_dot[1][i]) * k_scale * k_scale;
#pragma unroll
    for (int n = 0; n < Mine<D>::kN; ++n) {
      const float2 q = bf16_pair(s.q + i * kRowStride<D> + me.channel(n));
      const float2 k = bf16_pair(s.k + i * kRowStride<D> + me.channel(n));
      const int at = unit_at<D>(i, me.half * (D / 16) + n) + me.t * 2;
      *reinterpret_cast<uint32_t*>(s.d_o + at) =
          pack_bf16(q_scale * (dq[n][e] - q.x * q_along), q_scale * (dq[n][e + 1] - q.y * q_along));
      *reinterpret_cast<uint32_t*>(s.dv + at) =
          pack_bf16(k_scale * (dk[n][e] - k.x * k_along), k_scale * (dk[n][e + 1] - k.y * k_along));
    }
  }
}

template <int D>
__device__ __forceinline__ void store_tile(const bf16_t* tile, bf16_t* to, int64_t ld, int length) {
  constexpr int kUnits = D / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kUnits / kLocalThreads; ++i) {
    const int at = i * kLocalThreads + static_cast<int>(threadIdx.x), row = at / kUnits, unit = at % kUnits;
    if (row < length) {
      *reinterpret_cast<uint4*>(to + row * ld + unit * 8) =
          *reinterpret_cast<const uint4*>(tile + unit_at<D>(row, unit));
    }
  }
}

// dg = dG summed backwards within each document, then through the gate; the chunk's share of the parameters' gradients.
template <int D>
__device__ __forceinline__ void gate_gradients(const Tokens& in, const Place& p, const LocalBackward& a, Shared<D>& s) {
  const ChannelWalk<D> walk;
  constexpr int kRows = ChannelWalk<D>::kRows, kGroups = ChannelWalk<D>::kGroups;
  const int c = walk.channel, last = p.length - 1;
  float2 local[kRows], run = {0.f, 0.f};
  bool restarts = false;
#pragma unroll
  for (int r = kRows - 1; r >= 0; --r) {
    const int i = walk.row(r);
    const float2 dG = *reinterpret_cast<const float2*>(s.dG + i * kDecayStride<D> + c);
    run.x += dG.x;
    run.y += dG.y;
    if (i == last) {
      const float2 G = decay_at(s, kChunk - 1, c);
      const bool entered = s.first[last] < 0;
      float2 states = {0.f, 0.f};
      for (int group = 0; group < kGroups; ++group) {
        states.x += s.state_sum[group * D + c];
        states.y += s.state_sum[group * D + c + 1];
      }
      run.x += entered ? states.x * exp2_fast(G.x) : 0.f;
      run.y += entered ? states.y * exp2_fast(G.y) : 0.f;
      for (int tile = 0; tile < kTiles; ++tile) {
        run.x += s.write_sum[tile * D + c];
        run.y += s.write_sum[tile * D + c + 1];
      }
    }
    local[r] = run;
    if (s.first[i] == i) {
      run = {0.f, 0.f};
      restarts = true;
    }
  }
  *reinterpret_cast<float2*>(s.sums + walk.group * D + c) = run;
  if (c == 0) s.group_restarts[walk.group] = restarts;
  __syncthreads();
  float2 later = {0.f, 0.f};
  for (int group = kGroups - 1; group > walk.group; --group) {
    const float2 sum = *reinterpret_cast<const float2*>(s.sums + group * D + c);
    later = s.group_restarts[group] ? sum : float2{later.x + sum.x, later.y + sum.y};
  }
  __syncthreads();  // the sums are read

  const GateRates gate = gate_rates(in, p, D, c);
  float2 d_bias = {0.f, 0.f};
  float d_A_log = 0.f;
#pragma unroll
  for (int r = kRows - 1; r >= 0; --r) {
    const int i = walk.row(r);
    if (i < p.length) {
      const float2 logit = bf16_pair(in.gate + (p.row + i) * in.gate_ld + p.h * D + c);
      const float2 y = {logit.x + gate.bias.x, logit.y + gate.bias.y};
      // The slope first: where it is zero, a huge rate must not matter.
      const float2 dx = {(local[r].x + later.x) * (gate.bound * sigmoid_slope(gate.rate * y.x).slope) * gate.rate,
                         (local[r].y + later.y) * (gate.bound * sigmoid_slope(gate.rate * y.y).slope) * gate.rate};
      d_bias.x += dx.x;
      d_bias.y += dx.y;
      d_A_log += dx.x * y.x + dx.y * y.y;
      *reinterpret_cast<uint32_t*>(a.dgate + (p.row + i) * a.dgate_ld + p.h * D + c) = pack_bf16(dx.x, dx.y);
    }
    if (s.first[i] == i) later = {0.f, 0.f};
  }
  *reinterpret_cast<float2*>(s.sums + walk.group * D + c) = d_bias;
  d_A_log = block_sum<kLocalThreads>(d_A_log, s.block);  // and a barrier
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) a.d_A_log[p.index] = d_A_log;
  if (i < D) {
    float sum = 0.f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) sum += s.sums[group * D + i];
    a.d_bias[p.index * D + i] = sum;
  }
}

template <int D>
__global__ void __launch_bounds__(kLocalThreads, 1)
    local_backward_kernel(Tokens in, Prepared ready, LocalBackward a, float q_factor) {
  Shared<D>& s = *reinterpret_cast<Shared<D>*>(shared_memory());
  const int64_t chain = blockIdx.x / in.chunks;
  const Place p = place_of(in, chain, blockIdx.x - chain * in.chunks);
  const Mine<D> me;
  const float offset = anchor_offset(in.bound);
  load(in, ready, a, p, s);
  row_scales<D>(s.q, q_factor, s.q_scale);
  row_scales<D>(s.k, 1.f, s.k_scale);
  running_decays<D>(in, p, s.gate, s.G, s.sums);
  wait_copies<0>();
  __syncthreads();
  residual(me, s);
  __syncthreads();
  written(me, s);
  __syncthreads();  // u is there; gate, solve, k_in and v are done with
  fetch_tile<D, D, kLocalThreads>(s.dS, a.d_states + p.index * D * D, D);
  commit_copies();
  for_tile_pairs(
      static_cast<int>(threadIdx.x) / 32, [&](int I) { d_scores(p, a, s, I, I); },
      [&](int I, int J) { d_scores(p, a, s, I, J); });
  wait_copies<0>();
  __syncthreads();
  Sums<D> dq = {}, row = {}, col = {};
  state_products<D>(me, s, dq, row, col);
  state_sum(s);
  pairs_as_rows<D>(me, s, offset, dq, row);
  write_gradients<D>(me, p, s, col);
  pairs_as_columns<D>(me, s, offset, col);
  __syncthreads();  // all are done with the states, dO and dV
  decay_gradients<D>(me, p, s, dq, row, col);
  __syncthreads();
  norm_gradients<D>(me, s, dq, row);
  __syncthreads();
  store_tile<D>(s.d_o, a.dq + p.row * a.dq_ld + p.h * D, a.dq_ld, p.length);
  store_tile<D>(s.dv, a.dk + p.row * a.dk_ld + p.h * D, a.dk_ld, p.length);
  gate_gradients(in, p, a, s);
}

template <int D>
void launch_local(cudaStream_t stream, int64_t chains, const Tokens& in, const Prepared& ready,
                  const LocalBackward& a) {
  launch(local_backward_kernel<D>, dim3(static_cast<unsigned>(chains * in.chunks)), kLocalThreads, sizeof(Shared<D>),
         stream, in, ready, a, 1.f / sqrtf(static_cast<float>(D)));
}

// One block per head: dt_bias channel by channel, A_log spread over the block and summed in a fixed order.
constexpr int kSumThreads = 256;
__global__ void __launch_bounds__(kSumThreads)
    add_kernel(int64_t B, int64_t H, int64_t K, int64_t chunks, const float* d_bias, const float* d_A_log,
               float* ddt_bias, float* dA_log) {
  __shared__ float shared[kSumThreads / 32];
  const int64_t h = blockIdx.x, n = B * chunks;  // shares of this head: n, in the order of the batch
  const auto share = [&](int64_t i) { return (i / chunks * H + h) * chunks + i % chunks; };
  for (int64_t c = threadIdx.x; c < K; c += kSumThreads) {
    float sum = 0.f;
#pragma unroll 8
    for (int64_t i = 0; i < n; ++i) sum += d_bias[share(i) * K + c];
    ddt_bias[h * K + c] += sum;
  }
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < n; i += kSumThreads) sum += d_A_log[share(i)];
  sum = block_sum<kSumThreads>(sum, shared);
  if (threadIdx.x == 0) dA_log[h] += sum;
}

}  // namespace

void local_backward(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready,
                    const LocalBackward& a) {
  D == 64 ? launch_local<64>(stream, chains, in, ready, a) : launch_local<128>(stream, chains, in, ready, a);
}

void add_parameter_grads(cudaStream_t stream, const KdaDims& d, int64_t chunks, const float* d_bias,
                         const float* d_A_log, float* ddt_bias, float* dA_log) {
  launch(add_kernel, dim3(static_cast<unsigned>(d.H)), kSumThreads, 0, stream, d.B, d.H, d.K, chunks, d_bias, d_A_log,
         ddt_bias, dA_log);
}

}  // namespace kestrel::cuda::kda
