// The serial part of the forward pass: a chain's chunks in order, the state in registers.
//
// One block per chain and kRows value rows; a warp owns 16 of them, S^T [16,K] as float sums of its matrix products.
// Everything is computed transposed (value rows by tokens), so that the sums of one product are, rounded, the left
// operand of the next, and the state never leaves its registers:
//   R^T = (V^T - S^T K_in^T) diag(beta)     U^T = R^T A^T     O^T = S^T Q_in^T + U^T Aqk^T
//   S^T <- S^T diag(2^G_last) + U^T K_out
// Value rows do not meet, so the bits do not depend on kRows.
// Bytes per token and head at K = V = 128: 1.3 KB read (more with kRows < V), 256 written, 512 more with `saved`.
// FLOPs: 6 K V + 5 (K + V) 64.  Bound by memory with many chains, by the chain's latency with few.
#include "kernels/kda/kda_launch.cuh"
#include "kernels/kda/kda_scan.cuh"

namespace kestrel::cuda::kda {
namespace {

template <int D, int kRows>
struct Stage {  // one chunk's operands
  bf16_t k_in[kChunk * D], q_in[kChunk * D], k_out[kChunk * D];
  __half solve[kSquare];
  bf16_t scores[kSquare];
  bf16_t v[kChunk * kRows];
  float decay[D], beta[kChunk];
};

template <int D, int kRows>
struct Shared {
  Stage<D, kRows> stage[2];
  bf16_t way_out[kRows / kTileRows][kWayOut<D>];
};

template <int D, int kRows>
__device__ __forceinline__ void fetch(const Tokens& in, const Prepared& ready, const Place& p, int value0,
                                      Stage<D, kRows>& s) {
  constexpr int kThreads = kRows * 2;
  fetch_tile<kChunk, D, kThreads>(s.k_in, ready.k_in + p.index * kChunk * D, D);
  fetch_tile<kChunk, kRows, kThreads>(s.v, in.v + p.row * in.v_ld + p.h * D + value0, in.v_ld, p.length);
  fetch_tile<kChunk, kChunk, kThreads>(s.solve, ready.solve + p.index * kSquare, kChunk);
  fetch_tile<kChunk, D, kThreads>(s.q_in, ready.q_in + p.index * kChunk * D, D);
  fetch_tile<kChunk, kChunk, kThreads>(s.scores, ready.scores + p.index * kSquare, kChunk);
  fetch_tile<kChunk, D, kThreads>(s.k_out, ready.k_out + p.index * kChunk * D, D);
  const int i = static_cast<int>(threadIdx.x);
  if (i < D / 4) copy16_async(s.decay + i * 4, ready.decay + p.index * D + i * 4);
  if (i < kChunk / 4) copy16_async(s.beta + i * 4, ready.beta + p.index * kChunk + i * 4);
  commit_copies();
}

// R^T = (V^T - S^T K_in^T) diag(beta), rounded once.
template <int D, int kRows>
__device__ __forceinline__ void residual(uint32_t (&r)[kTiles][4], const State<D>& S, const Stage<D, kRows>& s,
                                         int warp) {
  const int t = lane_id() & 3;
  float x[4][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n % 2 == 0) S.times_rows(x, s.k_in, n / 2);
    uint32_t v[4];  // V^T of 16 tokens, laid out as the sums: rows g and g + 8 of the first eight, then of the next
    load_a_from_k_rows<kRows>(v, s.v, warp, n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 beta = *reinterpret_cast<const float2*>(s.beta + n * 16 + half * 8 + t * 2);
      float(&y)[4] = x[n % 2 * 2 + half];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t pair = v[half * 2 + row];
        y[row * 2] = beta.x * (__uint_as_float(pair << 16) - y[row * 2]);
        y[row * 2 + 1] = beta.y * (__uint_as_float(pair & 0xffff0000u) - y[row * 2 + 1]);
      }
    }
    as_operand(r[n], x[n % 2 * 2], x[n % 2 * 2 + 1]);
  }
}

// U^T = R^T A^T, rounded; A in two parts of 8 bits.
__device__ __forceinline__ void written(uint32_t (&u)[kTiles][4], const uint32_t (&r)[kTiles][4], const __half* solve) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float x[2][4] = {};
#pragma unroll
    for (int k = 0; k <= n; ++k) {
      uint32_t a[4], high[4], low[4];
      load_b_from_n_rows<kChunk>(a, solve, k, n);
      split_f16(a, high, low);
      mma_pair(x[0], x[1], r[k], low);
      mma_pair(x[0], x[1], r[k], high);
    }
    as_operand(u[n], x[0], x[1]);
  }
}

// O^T = S^T Q_in^T + U^T Aqk^T, into the way out.
template <int D, int kRows>
__device__ __forceinline__ void outputs(const State<D>& S, const uint32_t (&u)[kTiles][4], const Stage<D, kRows>& s,
                                        bf16_t* way_out) {
  float x[4][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n % 2 == 0) S.times_rows(x, s.q_in, n / 2);
    float(&x0)[4] = x[n % 2 * 2], (&x1)[4] = x[n % 2 * 2 + 1];
#pragma unroll
    for (int k = 0; k <= n; ++k) {
      uint32_t b[4];
      load_b_from_n_rows<kChunk>(b, s.scores, k, n);
      mma_pair(x0, x1, u[k], b);
    }
    uint32_t rounded[4];
    as_operand(rounded, x0, x1);
    put_tokens(way_out, n, rounded);
  }
}

template <int D, int kRows>
__global__ void __launch_bounds__(kRows * 2, 1) scan_kernel(Tokens in, Prepared ready, Scan a) {
  Shared<D, kRows>& s = *reinterpret_cast<Shared<D, kRows>*>(shared_memory());
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t chain = blockIdx.x;
  const int value0 = static_cast<int>(blockIdx.y) * kRows, row0 = value0 + warp * kTileRows;
  State<D> S;
  S.load(a.initial_state == nullptr ? nullptr : a.initial_state + chain * D * D, row0);
  fetch(in, ready, place_of(in, chain, 0), value0, s.stage[0]);
  for (int64_t c = 0; c < in.chunks; ++c) {
    const Place p = place_of(in, chain, c);
    const Stage<D, kRows>& now = s.stage[c & 1];
    wait_copies<0>();
    __syncthreads();  // chunk c is there, and all warps are done with chunk c - 1
    if (c + 1 < in.chunks) fetch(in, ready, place_of(in, chain, c + 1), value0, s.stage[(c + 1) & 1]);
    S.round();
    if (a.saved != nullptr) S.store_rounded(s.way_out[warp], a.saved + (p.index * D + row0) * D);
    uint32_t r[kTiles][4], u[kTiles][4];
    residual(r, S, now, warp);
    written(u, r, now.solve);
    outputs(S, u, now, s.way_out[warp]);
    store_tokens(s.way_out[warp], a.o + p.row * a.o_ld + p.h * D + row0, a.o_ld, p.length);
    S.scale_columns(now.decay);
    S.add_outer(u, now.k_out);
  }
  if (a.final_state != nullptr) S.store(a.final_state + chain * D * D, row0);
}

template <int D, int kRows>
void launch_scan(cudaStream_t stream, int64_t chains, const Tokens& in, const Prepared& ready, const Scan& a) {
  launch(scan_kernel<D, kRows>, dim3(static_cast<unsigned>(chains), D / kRows), kRows * 2, sizeof(Shared<D, kRows>),
         stream, in, ready, a);
}

}  // namespace

void scan(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready, const Scan& a) {
  if (D == 64) return launch_scan<64, 64>(stream, chains, in, ready, a);
  if (chains * 2 <= multiprocessors()) return launch_scan<128, 64>(stream, chains, in, ready, a);
  launch_scan<128, 128>(stream, chains, in, ready, a);
}

}  // namespace kestrel::cuda::kda
