// What the two scans share: a state (or its gradient) of 16 value rows per warp in registers, transposed, and the ways
// in and out.
#pragma once

#include "kernels/kda/kda_chunk.cuh"

namespace kestrel::cuda::kda {

constexpr int kSquare = kChunk * kChunk;

// A warp's way out through shared memory, for 16 rows of S^T [16,D] or for 16 columns of a [64,D] matrix.
constexpr int kTokenStride = kTileRows + 8;
template <int D>
constexpr int kWayOut =
    kTileRows* kRowStride<D> > kChunk* kTokenStride ? kTileRows* kRowStride<D> : kChunk* kTokenStride;

// S^T: rows row0 + g and row0 + g + 8, columns 8 n + 2 t and the next; the sums of products, and rounded as operands.
template <int D>
struct State {
  float sum[D / 8][4];
  uint32_t operand[D / 16][4];

  __device__ __forceinline__ void round() {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) as_operand(operand[k], sum[2 * k], sum[2 * k + 1]);
  }
  // From and to a [K,V] state in memory; null: zero.
  __device__ __forceinline__ void load(const float* state, int row0) {
    const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[n][e] = state == nullptr ? 0.f : state[(n * 8 + t * 2 + (e & 1)) * D + row0 + g + (e >> 1) * 8];
      }
    }
  }
  __device__ __forceinline__ void store(float* state, int row0) const {
    const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[(n * 8 + t * 2 + (e & 1)) * D + row0 + g + (e >> 1) * 8] = sum[n][e];
    }
  }
  // The rounded state to 16 rows of a [V,K] matrix.
  __device__ __forceinline__ void store_rounded(bf16_t* way_out, bf16_t* to) const {
    const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32_t*>(way_out + (g + (i & 1) * 8) * kRowStride<D> + k * 16 + (i >> 1) * 8 + t * 2) =
            operand[k][i];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int at = i * 32 + lane, row = at / (D / 8), c = at % (D / 8) * 8;
      *reinterpret_cast<uint4*>(to + row * D + c) = *reinterpret_cast<const uint4*>(way_out + row * kRowStride<D> + c);
    }
    __syncwarp();
  }
  // S^T <- S^T diag(decay).
  __device__ __forceinline__ void scale_columns(const float* decay) {
    const int t = lane_id() & 3;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float2 a = *reinterpret_cast<const float2*>(decay + n * 8 + t * 2);
      sum[n][0] *= a.x, sum[n][1] *= a.y, sum[n][2] *= a.x, sum[n][3] *= a.y;
    }
  }
  // x^T = S^T rows^T for 32 of 64 rows [64,D]: tiles 2 pair and 2 pair + 1.
  __device__ __forceinline__ void times_rows(float (&x)[4][4], const bf16_t* rows, int pair) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b[4];
        load_b_from_n_rows<D>(b, rows, k, pair * 2 + n);
        mma_pair(x[2 * n], x[2 * n + 1], operand[k], b);
      }
    }
  }
  // S^T += x^T rows for 64 rows [64,D].
  __device__ __forceinline__ void add_outer(const uint32_t (&x)[kTiles][4], const bf16_t* rows) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_b_from_k_rows<D>(b, rows, k, n);
        mma_pair(sum[2 * n], sum[2 * n + 1], x[k], b);
      }
    }
  }
};

// Puts 16 tokens of a rounded x^T [16,64] into the way out, transposed.
__device__ __forceinline__ void put_tokens(bf16_t* way_out, int n16, const uint32_t (&x)[4]) {
  const int lane = lane_id();
  // Tiles: values 0-7 and 8-15 of the first eight tokens, then of the next eight.
  stmatrix_x4_trans(way_out + (n16 * 16 + (lane & 7) + ((lane >> 4) << 3)) * kTokenStride + ((lane >> 3) & 1) * 8, x);
}
// ... and from there to 16 columns of the first `length` rows of a matrix.
__device__ __forceinline__ void store_tokens(const bf16_t* way_out, bf16_t* to, int64_t ld, int length) {
  const int lane = lane_id();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunk * 2 / 32; ++i) {
    const int token = (i * 32 + lane) / 2, part = lane % 2;
    if (token < length) {
      *reinterpret_cast<uint4*>(to + token * ld + part * 8) =
          *reinterpret_cast<const uint4*>(way_out + token * kTokenStride + part * 8);
    }
  }
  __syncwarp();
}

}  // namespace kestrel::cuda::kda
