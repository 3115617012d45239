// Attention backward with bf16 tensor-core tiles, in two passes that each write their outputs once: no atomics, the
// same bits in every run.  With P = softmax and delta, lse from attention_row_terms:
//   dS = P (dO V^T - delta);   dQ = scale dS K   (a block of 128 queries over tiles of keys)
//   dV = P^T dO;   dK = scale dS^T Q             (a block of 128 keys over tiles of queries)
// Seven products where one pass would take five, B H T^2 (4 Dqk + 3 Dv) half-square FLOPs; bound by mma and by
// shared-memory reads alike.
#include "kernels/attention/attention_tiles.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kRows = kAttentionWarps * kWarpRows;  // a block's own rows: queries in one pass, keys in the other
constexpr int kStep = 64;                           // rows of the other kind at a time

// Tiles in flight: two where shared memory holds them.
template <int DQ, int DV>
constexpr int kStages = DQ + DV <= 320 ? 2 : 1;
template <int DQ, int DV>
constexpr int kTilesBytes = 2 * (kTileElements<kRows, DQ> + kTileElements<kRows, DV> +
                                 kStages<DQ, DV> * (kTileElements<kStep, DQ> + kTileElements<kStep, DV>));

// What both passes read besides q, k, v.
struct BackwardInput {
  HeadRows<const bf16_t> d_o;
  const float *delta, *lse_log2;
};

// A pass's own two tiles and the stages of the other two.
template <int DQ, int DV>
struct Tiles {
  bf16_t *own_q, *own_v, *stage;
  static constexpr int kStageElements = kTileElements<kStep, DQ> + kTileElements<kStep, DV>;
  __device__ explicit Tiles(unsigned char* memory)
      : own_q(reinterpret_cast<bf16_t*>(memory)),
        own_v(own_q + kTileElements<kRows, DQ>),
        stage(own_v + kTileElements<kRows, DV>) {}
  __device__ bf16_t* q_stage(int step) const { return stage + step % kStages<DQ, DV> * kStageElements; }
  __device__ bf16_t* v_stage(int step) const { return q_stage(step) + kTileElements<kStep, DQ>; }
};

// The order of copies and barriers of both passes: `load(step)` queues the copies of a step, `use(step)` reads them.
template <int stages, class Load, class Use>
__device__ __forceinline__ void pipeline(int steps, Load&& load, Use&& use) {
  if (stages == 2) {
    load(0);
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    if (stages == 1) {
      __syncthreads();  // everyone is done with the step before
      load(step);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();
    if (stages == 2 && step + 1 < steps) {
      load(step + 1);
      commit_copies();
    }
    use(step);
  }
}

template <int DQ, int DV>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    dq_kernel(AttentionInput<bf16_t> in, BackwardInput back, HeadRows<bf16_t> dq_all, int tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Tiles<DQ, DV> tile(memory);  // own: q, d_o; stages: k, v
  const int64_t head = blockIdx.x / tiles, b = head / in.H, h = head % in.H;
  const int T = in.T, i0 = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * kRows;  // the longest first
  const HeadRows<const bf16_t> k = in.k.of(b, h, T), v = in.v.of(b, h, T);
  const int32_t* start = in.start ? in.start + b * T : nullptr;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warp_row = warp * kWarpRows, warp_i0 = i0 + warp_row;
  const int last_start = start ? start[min(warp_i0 + kWarpRows, T) - 1] : 0;
  int row[2], first_visible[2];
  float lse_log2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = warp_i0 + lane / 4 + 8 * half;
    const int i = min(row[half], T - 1);  // rows beyond the sequence are not stored
    first_visible[half] = start ? start[i] : 0;
    lse_log2[half] = back.lse_log2[head * T + i];
    delta[half] = back.delta[head * T + i];
  }

  const int first = start ? start[i0] / kStep * kStep : 0, end = min(i0 + kRows, T);
  load_tile<kRows, DQ>(tile.own_q, in.q.of(b, h, T), i0, T);
  load_tile<kRows, DV>(tile.own_v, back.d_o.of(b, h, T), i0, T);
  float dq[DQ / 8][4] = {};
  const float scale_log2 = in.scale * kLog2e;
  const auto load = [&](int step) {
    load_tile<kStep, DQ>(tile.q_stage(step), k, first + step * kStep, T);
    load_tile<kStep, DV>(tile.v_stage(step), v, first + step * kStep, T);
  };
  const auto use = [&](int step) {
    const int j0 = first + step * kStep;
    if (j0 > warp_i0 + kWarpRows - 1) return;
    float p[kStep / 8][4] = {}, ds[kStep / 8][4] = {};
    multiply_rows<DQ, kStep>(p, tile.own_q, warp_row, tile.q_stage(step), 0);
    multiply_rows<DV, kStep>(ds, tile.own_v, warp_row, tile.v_stage(step), 0);
    const bool masked = j0 + kStep - 1 > warp_i0 || last_start > j0;
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2, j = j0 + n * 8 + lane % 4 * 2 + e % 2;
        float x = exp2_fast(fmaf(p[n][e], scale_log2, -lse_log2[half]));
        if (masked && (j > row[half] || j < first_visible[half])) x = 0.f;
        ds[n][e] = x * (ds[n][e] - delta[half]);
      }
    }
    multiply_sums<DQ, kStep>(dq, ds, tile.q_stage(step), 0);
  };
  pipeline<kStages<DQ, DV>>((end - first + kStep - 1) / kStep, load, use);
  store_sums<DQ, kTileStride<DQ>>(dq_all.of(b, h, T), tile.own_q + warp_row * kTileStride<DQ>, dq, in.scale, in.scale,
                                  warp_i0, T);
}

// Steps of queries, from query i0 on, of which some query sees a key up to `last_key`: the first visible key of a query
// never decreases along the sequence.
__device__ __forceinline__ int visible_steps(const int32_t* start, int i0, int T, int last_key) {
  const int steps = (T - i0 + kStep - 1) / kStep;
  if (!start) return steps;
  int lo = 1, hi = steps;  // the first step holds the keys' own queries
  while (lo < hi) {
    const int middle = (lo + hi) / 2;
    if (start[i0 + middle * kStep] <= last_key) {
      lo = middle + 1;
    } else {
      hi = middle;
    }
  }
  return lo;
}

// What a stage of queries holds besides their tiles.
struct QueryTerms {
  float lse_log2[kStep], delta[kStep];
  int start[kStep];
};

// kKeysToo, kValuesToo: which of dK and dV this launch computes.  Both, where registers hold both sums.
template <int DQ, int DV, bool kKeysToo, bool kValuesToo>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    dkv_kernel(AttentionInput<bf16_t> in, BackwardInput back, HeadRows<bf16_t> dk_all, HeadRows<bf16_t> dv_all,
               int tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kQueries = 32;       // of a step, at a time: what registers hold
  const Tiles<DQ, DV> tile(memory);  // own: k, v; stages: q, d_o
  QueryTerms* terms = reinterpret_cast<QueryTerms*>(memory + kTilesBytes<DQ, DV>);
  const int64_t head = blockIdx.x / tiles, b = head / in.H, h = head % in.H;
  const int T = in.T, j0 = static_cast<int>(blockIdx.x % tiles) * kRows;  // the longest first
  const HeadRows<const bf16_t> q = in.q.of(b, h, T), d_o = back.d_o.of(b, h, T);
  const int32_t* start = in.start ? in.start + b * T : nullptr;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warp_row = warp * kWarpRows, warp_j0 = j0 + warp_row;
  const int key[2] = {warp_j0 + lane / 4, warp_j0 + lane / 4 + 8};

  load_tile<kRows, DQ>(tile.own_q, in.k.of(b, h, T), j0, T);
  load_tile<kRows, DV>(tile.own_v, in.v.of(b, h, T), j0, T);
  float dk[kKeysToo ? DQ / 8 : 1][4] = {}, dv[kValuesToo ? DV / 8 : 1][4] = {};
  const float scale_log2 = in.scale * kLog2e;
  const auto load = [&](int step) {
    const int i0 = j0 + step * kStep, r = static_cast<int>(threadIdx.x);
    load_tile<kStep, DQ>(tile.q_stage(step), q, i0, T);
    load_tile<kStep, DV>(tile.v_stage(step), d_o, i0, T);
    if (r >= kStep) return;
    // Queries beyond the sequence: their rows of q and d_o are zero, and with finite terms so is all they add.
    QueryTerms& t = terms[step % kStages<DQ, DV>];
    const bool valid = i0 + r < T;
    const int64_t at = head * T + (valid ? i0 + r : 0);
    copy4_async(&t.lse_log2[r], back.lse_log2 + at, valid);
    copy4_async(&t.delta[r], back.delta + at, valid);
    if (start) copy4_async(&t.start[r], start + (valid ? i0 + r : 0), valid);
  };
  const auto use = [&](int step) {
    const QueryTerms& t = terms[step % kStages<DQ, DV>];
#pragma unroll 1
    for (int q0 = 0; q0 < kStep; q0 += kQueries) {
      const int i0 = j0 + step * kStep + q0;
      if (i0 + kQueries - 1 < warp_j0 || i0 >= T) continue;          // all queries come before all keys
      if (start && t.start[q0] > warp_j0 + kWarpRows - 1) continue;  // or belong to later documents
      const int last = min(q0 + kQueries, T - (i0 - q0)) - 1;        // of the stage's queries
      const bool masked = i0 < warp_j0 + kWarpRows - 1 || (start && t.start[last] > warp_j0);
      float p[kQueries / 8][4] = {}, ds[kQueries / 8][4] = {};
      multiply_rows<DQ, kQueries>(p, tile.own_q, warp_row, tile.q_stage(step), q0);
      if (kKeysToo) multiply_rows<DV, kQueries>(ds, tile.own_v, warp_row, tile.v_stage(step), q0);
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int c = n * 8 + lane % 4 * 2 + e % 2, j = key[e / 2];
          float x = exp2_fast(fmaf(p[n][e], scale_log2, -t.lse_log2[q0 + c]));
          if (masked && (j > i0 + c || (start && j < t.start[q0 + c]))) x = 0.f;
          p[n][e] = x;
          ds[n][e] = x * (ds[n][e] - t.delta[q0 + c]);
        }
      }
      if constexpr (kValuesToo) multiply_sums<DV, kQueries>(dv, p, tile.v_stage(step), q0);
      if constexpr (kKeysToo) multiply_sums<DQ, kQueries>(dk, ds, tile.q_stage(step), q0);
    }
  };
  pipeline<kStages<DQ, DV>>(visible_steps(start, j0, T, min(j0 + kRows, T) - 1), load, use);
  if constexpr (kKeysToo) {
    store_sums<DQ, kTileStride<DQ>>(dk_all.of(b, h, T), tile.own_q + warp_row * kTileStride<DQ>, dk, in.scale, in.scale,
                                    warp_j0, T);
  }
  if constexpr (kValuesToo) {
    store_sums<DV, kTileStride<DV>>(dv_all.of(b, h, T), tile.own_v + warp_row * kTileStride<DV>, dv, 1.f, 1.f, warp_j0,
                                    T);
  }
}

template <int DQ, int DV, bool kKeysToo, bool kValuesToo>
void launch_dkv(cudaStream_t stream, unsigned blocks, const AttentionInput<bf16_t>& in, const BackwardInput& back,
                const HeadRows<bf16_t>& dk, const HeadRows<bf16_t>& dv, int tiles) {
  constexpr int kBytes = kTilesBytes<DQ, DV> + kStages<DQ, DV> * static_cast<int>(sizeof(QueryTerms));
  allow_shared(dkv_kernel<DQ, DV, kKeysToo, kValuesToo>, kBytes);
  dkv_kernel<DQ, DV, kKeysToo, kValuesToo><<<blocks, kAttentionThreads, kBytes, stream>>>(in, back, dk, dv, tiles);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void attention_backward_mma(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                            Tensor delta, Tensor lse_log2, Tensor q, Tensor k, Tensor v, Tensor document_start) {
  const cudaStream_t stream = cuda_stream(s);
  const AttentionInput<bf16_t> in(d, q, k, v, document_start);
  const BackwardInput back{HeadRows<const bf16_t>(d_o, d.Dv), delta.f32(), lse_log2.f32()};
  const HeadRows<bf16_t> to_q(dq, d.Dqk), to_k(dk, d.Dqk), to_v(dv, d.Dv);
  const int tiles = static_cast<int>(divide_up(d.T, kRows));
  const unsigned blocks = grid_of(d.B * d.H * tiles);
  with_widths(d, [&](auto widths) {
    using W = decltype(widths);
    constexpr int kBytes = kTilesBytes<W::DQ, W::DV>;
    allow_shared(dq_kernel<W::DQ, W::DV>, kBytes);
    dq_kernel<W::DQ, W::DV><<<blocks, kAttentionThreads, kBytes, stream>>>(in, back, to_q, tiles);
    CUDA_CHECK(cudaGetLastError());
    if constexpr (W::DQ + W::DV <= 320) {
      launch_dkv<W::DQ, W::DV, true, true>(stream, blocks, in, back, to_k, to_v, tiles);
    } else {
      launch_dkv<W::DQ, W::DV, true, false>(stream, blocks, in, back, to_k, to_v, tiles);
      launch_dkv<W::DQ, W::DV, false, true>(stream, blocks, in, back, to_k, to_v, tiles);
    }
  });
}

}  // namespace kestrel::cuda
