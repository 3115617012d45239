// Tiles of bf16 rows in shared memory, and the fragments that mma_16x8x16 takes from them.
//
// A tile of R rows of D columns (D a multiple of 16) has rows D + 8 elements apart: an odd number of 16-byte units, so
// the eight rows of an ldmatrix lie in different banks.
#pragma once

#include "kernels/attention/head_rows.cuh"
#include "kernels/core/mma.cuh"

namespace kestrel::cuda {

constexpr int kAttentionThreads = 256, kAttentionWarps = kAttentionThreads / kWarp;
constexpr int kWarpRows = 16;  // rows of a tile that one warp computes with

template <int D>
constexpr int kTileStride = D + 8;
template <int R, int D>
constexpr int kTileElements = R* kTileStride<D>;

// Rows [first, first + R) of `rows`, of which the sequence has T: zero beyond T and beyond the rows' width.  Part of
// the caller's next group of copies.
template <int R, int D>
__device__ __forceinline__ void load_tile(bf16_t* tile, const HeadRows<const bf16_t>& rows, int first, int T) {
  if (rows.wide) {
    constexpr int kPackets = D / 8, kLoads = (R * kPackets + kAttentionThreads - 1) / kAttentionThreads;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kAttentionThreads;
      if (R * kPackets % kAttentionThreads != 0 && at >= R * kPackets) break;
      const int r = at / kPackets, c = at % kPackets * 8;
      const bool valid = first + r < T && c < rows.width;
      copy16_async(tile + r * kTileStride<D> + c, valid ? rows.row(first + r) + c : rows.data, valid);
    }
  } else {
    for (int at = static_cast<int>(threadIdx.x); at < R * D; at += kAttentionThreads) {
      const int r = at / D, c = at % D;
      const bool valid = first + r < T && c < rows.width;
      tile[r * kTileStride<D> + c] = valid ? rows.row(first + r)[c] : from_float<bf16_t>(0.f);
    }
  }
}

// The sixteen rows of this warp, `tile` pointing at their first, to rows [first, first + 16) of memory.
template <int D, int stride>
__device__ __forceinline__ void store_rows(const HeadRows<bf16_t>& rows, const bf16_t* tile, int first, int T) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (rows.wide) {
    constexpr int kPackets = D / 8;
#pragma unroll
    for (int at = lane; at < kWarpRows * kPackets; at += kWarp) {
      const int r = at / kPackets, c = at % kPackets * 8;
      if (first + r >= T || c >= rows.width) continue;
      *reinterpret_cast<uint4*>(rows.row(first + r) + c) = *reinterpret_cast<const uint4*>(tile + r * stride + c);
    }
  } else {
    for (int at = lane; at < kWarpRows * D; at += kWarp) {
      const int r = at / D, c = at % D;
      if (first + r < T && c < rows.width) rows.row(first + r)[c] = tile[r * stride + c];
    }
  }
}

// factor[half] * sum to this warp's sixteen rows of a tile (half 0: rows 0-7, half 1: rows 8-15), then to memory.  The
// tile may have been read by this warp only.
template <int D, int stride>
__device__ __forceinline__ void store_sums(const HeadRows<bf16_t>& rows, bf16_t* tile, const float (&sum)[D / 8][4],
                                           float factor0, float factor1, int first, int T) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    uint32_t* upper = reinterpret_cast<uint32_t*>(tile + g * stride + n * 8 + 2 * t);
    uint32_t* lower = reinterpret_cast<uint32_t*>(tile + (g + 8) * stride + n * 8 + 2 * t);
    *upper = pack_bf16(factor0 * sum[n][0], factor0 * sum[n][1]);
    *lower = pack_bf16(factor1 * sum[n][2], factor1 * sum[n][3]);
  }
  __syncwarp();
  store_rows<D, stride>(rows, tile, first, T);
}

// A[16 rows from `row`, 16 columns from `k`] of a tile.
template <int stride>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const bf16_t* tile, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ldmatrix_x4(a, tile + (row + lane % 16) * stride + k + lane / 16 * 8);
}

// B[16 k][16 n] as two fragments, b[0..1] for n..n+7 and b[2..3] for n+8..n+15, from a tile whose rows are n.
template <int stride>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const bf16_t* tile, int n, int k) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ldmatrix_x4(b, tile + (n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8);
}

// The same from a tile whose rows are k.
template <int stride>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], const bf16_t* tile, int k, int n) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ldmatrix_x4_trans(b, tile + (k + lane % 16) * stride + n + lane / 16 * 8);
}

// d[0], d[1] += A B for the two fragments of load_b.
__device__ __forceinline__ void multiply_pair(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[4]) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  mma_16x8x16(d0, a, left);
  mma_16x8x16(d1, a, right);
}

// sum[16, N] += A[16, D] B[N, D]^T; A are 16 rows of a tile, B rows [n0, n0 + N) of another.
template <int D, int N>
__device__ __forceinline__ void multiply_rows(float (&sum)[N / 8][4], const bf16_t* a_tile, int row,
                                              const bf16_t* b_tile, int n0) {
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    uint32_t a[4], b[4];
    load_a<kTileStride<D>>(a, a_tile, row, k);
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      load_b<kTileStride<D>>(b, b_tile, n0 + n * 16, k);
      multiply_pair(sum[2 * n], sum[2 * n + 1], a, b);
    }
  }
}

// A 16 x 16 block of A from two neighbouring 16 x 8 blocks of sums, rounded to bf16.
__device__ __forceinline__ void fragment_of(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

// sum[16, D] += A[16, K] B[K, D]: A in registers as sums of an earlier product, B rows [k0, k0 + K) of a tile.
template <int D, int K>
__device__ __forceinline__ void multiply_sums(float (&sum)[D / 8][4], const float (&a_sums)[K / 8][4],
                                              const bf16_t* b_tile, int k0) {
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    uint32_t a[4], b[4];
    fragment_of(a, a_sums[2 * k], a_sums[2 * k + 1]);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      load_b_trans<kTileStride<D>>(b, b_tile, k0 + k * 16, n * 16);
      multiply_pair(sum[2 * n], sum[2 * n + 1], a, b);
    }
  }
}

// 4 bytes from global to shared memory; zero when !valid.
__device__ __forceinline__ void copy4_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}

// A kernel's dynamic shared memory beyond 48 KiB has to be asked for.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// f(DQ, DV) with the smallest pair of padded widths, as integral constants, that holds both.
template <int DQ_, int DV_>
struct Widths {
  static constexpr int DQ = DQ_, DV = DV_;
};
template <class F>
void with_widths(const AttentionDims& d, F&& f) {
  if (d.Dqk <= 64 && d.Dv <= 64) return f(Widths<64, 64>{});
  if (d.Dqk <= 128 && d.Dv <= 128) return f(Widths<128, 128>{});
  if (d.Dqk <= 192 && d.Dv <= 128) return f(Widths<192, 128>{});
  KESTREL_CHECK(d.Dqk <= kMostHeadChannels && d.Dv <= kMostHeadChannels, "attention heads of ", d.Dqk, " and ", d.Dv,
                " channels, at most ", kMostHeadChannels, " on CUDA");
  f(Widths<256, 256>{});
}

}  // namespace kestrel::cuda
