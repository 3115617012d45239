// The serial part of the backward pass: a chain's chunks in reverse, the gradient of the state in registers.
//
// Laid out as the forward scan (kda_scan.cu), dS^T [16 value rows, K] per warp:
//   dU^T = dO^T Aqk + dS'^T K_out^T      dV^T = (dU^T A) diag(beta)
//   dS^T <- dS'^T diag(2^G_last) + dO^T Q_in - dV^T K_in
// dV is final and goes to the caller; dS', rounded, is kept for every chunk (local_backward reads both).
// Bytes per token and head at K = V = 128: 1.3 KB read, 768 written.  FLOPs: 6 K V + 5 (K + V) 64.
#include "kernels/kda/kda_launch.cuh"
#include "kernels/kda/kda_scan.cuh"

namespace kestrel::cuda::kda {
namespace {

template <int D, int kRows>
struct Stage {
  bf16_t k_in[kChunk * D], q_in[kChunk * D], k_out[kChunk * D];
  __half solve[kSquare];
  bf16_t scores[kSquare];
  bf16_t d_o[kChunk * kRows];
  float decay[D], beta[kChunk];
};

template <int D, int kRows>
struct Shared {
  Stage<D, kRows> stage[2];
  bf16_t way_out[kRows / kTileRows][kWayOut<D>];
};

template <int D, int kRows>
__device__ __forceinline__ void fetch(const Prepared& ready, const ScanBackward& a, const Place& p, int value0,
                                      Stage<D, kRows>& s) {
  constexpr int kThreads = kRows * 2;
  fetch_tile<kChunk, D, kThreads>(s.k_out, ready.k_out + p.index * kChunk * D, D);
  fetch_tile<kChunk, kRows, kThreads>(s.d_o, a.d_o + p.row * a.d_o_ld + p.h * D + value0, a.d_o_ld, p.length);
  fetch_tile<kChunk, kChunk, kThreads>(s.scores, ready.scores + p.index * kSquare, kChunk);
  fetch_tile<kChunk, kChunk, kThreads>(s.solve, ready.solve + p.index * kSquare, kChunk);
  fetch_tile<kChunk, D, kThreads>(s.q_in, ready.q_in + p.index * kChunk * D, D);
  fetch_tile<kChunk, D, kThreads>(s.k_in, ready.k_in + p.index * kChunk * D, D);
  const int i = static_cast<int>(threadIdx.x);
  if (i < D / 4) copy16_async(s.decay + i * 4, ready.decay + p.index * D + i * 4);
  if (i < kChunk / 4) copy16_async(s.beta + i * 4, ready.beta + p.index * kChunk + i * 4);
  commit_copies();
}

// dU^T = dO^T Aqk + dS'^T K_out^T, rounded.
template <int D, int kRows>
__device__ __forceinline__ void d_written(uint32_t (&d_u)[kTiles][4], const uint32_t (&d_o)[kTiles][4],
                                          const State<D>& dS, const Stage<D, kRows>& s) {
  float x[4][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n % 2 == 0) dS.times_rows(x, s.k_out, n / 2);
    float(&x0)[4] = x[n % 2 * 2], (&x1)[4] = x[n % 2 * 2 + 1];
#pragma unroll
    for (int k = n; k < kTiles; ++k) {
      uint32_t b[4];
      load_b_from_k_rows<kChunk>(b, s.scores, k, n);
      mma_pair(x0, x1, d_o[k], b);
    }
    as_operand(d_u[n], x0, x1);
  }
}

// dV^T = (dU^T A) diag(beta), rounded, also into the way out; A in two parts of 8 bits.
template <int D, int kRows>
__device__ __forceinline__ void d_values(uint32_t (&d_v)[kTiles][4], const uint32_t (&d_u)[kTiles][4],
                                         const Stage<D, kRows>& s, bf16_t* way_out) {
  const int t = lane_id() & 3;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float x[2][4] = {};
#pragma unroll
    for (int k = n; k < kTiles; ++k) {
      uint32_t a[4], high[4], low[4];
      load_b_from_k_rows<kChunk>(a, s.solve, k, n);
      split_f16(a, high, low);
      mma_pair(x[0], x[1], d_u[k], low);
      mma_pair(x[0], x[1], d_u[k], high);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 beta = *reinterpret_cast<const float2*>(s.beta + n * 16 + half * 8 + t * 2);
      x[half][0] *= beta.x, x[half][1] *= beta.y, x[half][2] *= beta.x, x[half][3] *= beta.y;
    }
    as_operand(d_v[n], x[0], x[1]);
    put_tokens(way_out, n, d_v[n]);
  }
}

template <int D, int kRows>
__global__ void __launch_bounds__(kRows * 2, 1) scan_backward_kernel(Tokens in, Prepared ready, ScanBackward a) {
  Shared<D, kRows>& s = *reinterpret_cast<Shared<D, kRows>*>(shared_memory());
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t chain = blockIdx.x;
  const int value0 = static_cast<int>(blockIdx.y) * kRows, row0 = value0 + warp * kTileRows;
  State<D> dS;
  dS.load(a.d_final_state == nullptr ? nullptr : a.d_final_state + chain * D * D, row0);
  fetch(ready, a, place_of(in, chain, in.chunks - 1), value0, s.stage[(in.chunks - 1) & 1]);
  for (int64_t c = in.chunks - 1; c >= 0; --c) {
    const Place p = place_of(in, chain, c);
    const Stage<D, kRows>& now = s.stage[c & 1];
    wait_copies<0>();
    __syncthreads();  // chunk c is there, and all warps are done with chunk c + 1
    if (c > 0) fetch(ready, a, place_of(in, chain, c - 1), value0, s.stage[(c - 1) & 1]);
    dS.round();
    dS.store_rounded(s.way_out[warp], a.d_states + (p.index * D + row0) * D);
    uint32_t d_o[kTiles][4], d_u[kTiles][4], d_v[kTiles][4];
#pragma unroll
    for (int k = 0; k < kTiles; ++k) load_a_from_k_rows<kRows>(d_o[k], now.d_o, warp, k);
    d_written(d_u, d_o, dS, now);
    d_values(d_v, d_u, now, s.way_out[warp]);
    store_tokens(s.way_out[warp], a.dv + p.row * a.dv_ld + p.h * D + row0, a.dv_ld, p.length);
    dS.scale_columns(now.decay);
    dS.add_outer(d_o, now.q_in);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d_v[k][i] ^= 0x80008000u;  // both signs
    }
    dS.add_outer(d_v, now.k_in);
  }
  if (a.d_initial_state != nullptr) dS.store(a.d_initial_state + chain * D * D, row0);
}

template <int D, int kRows>
void launch_scan(cudaStream_t stream, int64_t chains, const Tokens& in, const Prepared& ready, const ScanBackward& a) {
  launch(scan_backward_kernel<D, kRows>, dim3(static_cast<unsigned>(chains), D / kRows), kRows * 2,
         sizeof(Shared<D, kRows>), stream, in, ready, a);
}

}  // namespace

void scan_backward(cudaStream_t stream, int D, int64_t chains, const Tokens& in, const Prepared& ready,
                   const ScanBackward& a) {
  if (D == 64) return launch_scan<64, 64>(stream, chains, in, ready, a);
  if (chains * 2 <= multiprocessors()) return launch_scan<128, 64>(stream, chains, in, ready, a);
  launch_scan<128, 128>(stream, chains, in, ready, a);
}

}  // namespace kestrel::cuda::kda
