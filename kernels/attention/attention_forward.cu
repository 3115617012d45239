// Attention forward with bf16 tensor-core tiles.  FLOPs: B H T^2 (Dqk + Dv), half of the square; bytes: q, k, v, o once
// each plus a pass over k and v per 128 queries, from L2.  Bound by the tensor cores' mma rate and, equally, by
// shared-memory reads (a warp of 16 queries reads all of every key tile).
//
// A block takes 128 queries of one head, eight warps of sixteen, and streams over tiles of 64 keys, of which the next
// is on its way while one is in use.  Scores, probabilities and running sums stay in registers.
#include <limits>

#include "kernels/attention/attention_tiles.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kQueries = kAttentionWarps * kWarpRows, kKeys = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <int DQ, int DV>
constexpr int kForwardBytes = 2 * (kTileElements<kQueries, DQ> + 2 * kTileElements<kKeys, DQ> +
                                   2 * kTileElements<kKeys, DV>);

// Running softmax of this thread's rows g and g + 8 of its warp's sixteen.
struct Softmax {
  float largest[2] = {kNone, kNone}, sum[2] = {0.f, 0.f};  // sum: this thread's columns only

  // Scores become e^(scale (score - largest)); returns through `factor` what the earlier sums must be multiplied with.
  template <int N>
  __device__ __forceinline__ void absorb(float (&s)[N][4], float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = largest[half];
#pragma unroll
      for (int n = 0; n < N; ++n) m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const float base = m == kNone ? 0.f : m * scale_log2;  // no key seen yet: all probabilities 0
      factor[half] = exp2_fast(fmaf(largest[half], scale_log2, -base));
      largest[half] = m;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[n][e] = exp2_fast(fmaf(s[n][e], scale_log2, -base));
          added += s[n][e];
        }
      }
      sum[half] = fmaf(sum[half], factor[half], added);
    }
  }
};

template <int DQ, int DV>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    forward_kernel(AttentionInput<bf16_t> in, HeadRows<bf16_t> o_all, float* lse, float* max_logit, int tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  bf16_t* q_tile = reinterpret_cast<bf16_t*>(memory);
  bf16_t* k_tiles = q_tile + kTileElements<kQueries, DQ>;
  bf16_t* v_tiles = k_tiles + 2 * kTileElements<kKeys, DQ>;
  const int64_t head = blockIdx.x / tiles, b = head / in.H, h = head % in.H;
  const int T = in.T;
  const int i0 = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * kQueries;  // the longest first
  const HeadRows<const bf16_t> q = in.q.of(b, h, T), k = in.k.of(b, h, T), v = in.v.of(b, h, T);
  const int32_t* start = in.start ? in.start + b * T : nullptr;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warp_i0 = i0 + warp * kWarpRows;
  const int row[2] = {warp_i0 + lane / 4, warp_i0 + lane / 4 + 8};
  int first_visible[2] = {0, 0}, last_start = 0;
  if (start) {
    first_visible[0] = start[row[0] < T ? row[0] : T - 1];
    first_visible[1] = start[row[1] < T ? row[1] : T - 1];
    last_start = start[warp_i0 + kWarpRows - 1 < T ? warp_i0 + kWarpRows - 1 : T - 1];
  }

  const int first = start ? start[i0] / kKeys * kKeys : 0, end = i0 + kQueries < T ? i0 + kQueries : T;
  const int steps = (end - first + kKeys - 1) / kKeys;
  load_tile<kQueries, DQ>(q_tile, q, i0, T);
  load_tile<kKeys, DQ>(k_tiles, k, first, T);
  load_tile<kKeys, DV>(v_tiles, v, first, T);
  commit_copies();

  float o[DV / 8][4] = {};
  Softmax softmax;
  const float scale_log2 = in.scale * kLog2e;
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // the tiles are here, and everyone is done with the pair before
    const int j0 = first + step * kKeys;
    const int now = step % 2, next = 1 - now;
    if (step + 1 < steps) {
      load_tile<kKeys, DQ>(k_tiles + next * kTileElements<kKeys, DQ>, k, j0 + kKeys, T);
      load_tile<kKeys, DV>(v_tiles + next * kTileElements<kKeys, DV>, v, j0 + kKeys, T);
      commit_copies();
    }
    if (j0 > warp_i0 + kWarpRows - 1) continue;  // all keys come after all of this warp's queries
    float s[kKeys / 8][4] = {};
    multiply_rows<DQ, kKeys>(s, q_tile, warp * kWarpRows, k_tiles + now * kTileElements<kKeys, DQ>, 0);
    if (j0 + kKeys - 1 > warp_i0 || last_start > j0) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = j0 + n * 8 + lane % 4 * 2 + e % 2;
          if (j > row[e / 2] || j < first_visible[e / 2]) s[n][e] = kNone;
        }
      }
    }
    float factor[2];
    softmax.absorb(s, scale_log2, factor);
#pragma unroll
    for (int n = 0; n < DV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] *= factor[e / 2];
    }
    multiply_sums<DV, kKeys>(o, s, v_tiles + now * kTileElements<kKeys, DV>, 0);
  }

  float inverse[2], highest = kNone;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse[half] = 1.f / sum;
    if (row[half] >= T) continue;
    const float largest = softmax.largest[half] * in.scale;
    highest = fmaxf(highest, largest);
    if (lane % 4 == 0) lse[head * T + row[half]] = largest + logf(sum);
  }
  store_sums<DV, kTileStride<DQ>>(o_all.of(b, h, T), q_tile + warp * kWarpRows * kTileStride<DQ>, o, inverse[0],
                                  inverse[1], warp_i0, T);
  if (!max_logit) return;
  highest = warp_max(highest);
  if (lane == 0 && highest > kNone) raise_to(max_logit + h, highest);
}

}  // namespace

void attention_forward_mma(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                           Tensor document_start, Tensor max_logit) {
  const AttentionInput<bf16_t> in(d, q, k, v, document_start);
  const HeadRows<bf16_t> out(o, d.Dv);
  const int64_t tiles = divide_up(d.T, kQueries);
  with_widths(d, [&](auto widths) {
    using W = decltype(widths);
    static_assert(W::DV <= W::DQ, "the output is staged where the queries lay");
    constexpr int kBytes = kForwardBytes<W::DQ, W::DV>;
    allow_shared(forward_kernel<W::DQ, W::DV>, kBytes);
    forward_kernel<W::DQ, W::DV><<<grid_of(d.B * d.H * tiles), kAttentionThreads, kBytes, cuda_stream(s)>>>(
        in, out, lse.f32(), max_logit ? max_logit.f32() : nullptr, static_cast<int>(tiles));
    CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace kestrel::cuda
