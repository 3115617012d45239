// Routing among few experts (top_k, E <= 128, k <= 8): a token belongs to L lanes with 16 experts each.
//
// Only values are sorted, in registers: two sorting networks of 8 per lane, the 8 largest of two sorted lists by
// max(a_i, b_7-i) and a bitonic merge, first within the lane, then between lanes.  Minimum and maximum are one
// instruction each, where carrying the index along would take a comparison and four selections.  The indices come
// afterwards: the k experts at or above the k-th value are collected, and the rank of each is the number of sorted
// values above its own.  The cutoff is the largest value below the k-th.
//
// All this is right when the values that matter are distinct numbers, and it shows when they are not: more or fewer
// than k experts reach the k-th value, two of the k values are equal, or nothing finite is left for the cutoff.  Such a
// token (ties, NaN, biases of -inf) is routed by rounds.  (A NaN in a network of min and max becomes a copy of the
// number it meets; no number is ever lost.)
#include "kernels/router/route.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kList = 8;      // values kept per token
constexpr int kPerLane = 16;  // experts

__device__ __forceinline__ void order(float& a, float& b) {
  const float high = fmaxf(a, b), low = fminf(a, b);
  a = high, b = low;
}
// Falling order; 19 comparisons, the least there are.
__device__ __forceinline__ void sort8(float (&v)[kList]) {
  order(v[0], v[1]), order(v[2], v[3]), order(v[4], v[5]), order(v[6], v[7]);
  order(v[0], v[2]), order(v[1], v[3]), order(v[4], v[6]), order(v[5], v[7]);
  order(v[1], v[2]), order(v[5], v[6]), order(v[0], v[4]), order(v[3], v[7]);
  order(v[1], v[5]), order(v[2], v[6]);
  order(v[1], v[4]), order(v[3], v[6]);
  order(v[2], v[4]), order(v[3], v[5]);
  order(v[3], v[4]);
}
// A bitonic list into falling order.
__device__ __forceinline__ void merge8(float (&v)[kList]) {
#pragma unroll
  for (int d = kList / 2; d > 0; d /= 2) {
#pragma unroll
    for (int i = 0; i < kList; ++i) {
      if ((i & d) == 0) order(v[i], v[i + d]);
    }
  }
}

// Expert of register i in lane `part` of a token's L: packets of four, so that a wide load of the L lanes is dense.
template <int L>
__device__ __forceinline__ int expert_of(int i, int part) {
  return (i / 4) * (4 * L) + part * 4 + i % 4;
}

template <int L, bool wide>
__global__ void __launch_bounds__(kWarp* kRouteWarps, 2) route_network_kernel(const RouteArguments a) {
  constexpr int kTokens = kWarp / L;  // of a warp at a time
  __shared__ int32_t count[kPerLane * L];
  __shared__ int chosen[kRouteWarps][kTokens * kList];  // as found
  __shared__ int sorted[kRouteWarps][kTokens * kList];  // by rank
  __shared__ float sorted_score[kRouteWarps][kTokens * kList];
  const int lane = threadIdx.x, part = lane % L, token = lane / L;
  int* const mine = chosen[threadIdx.y] + token * kList;
  int* const ranked = sorted[threadIdx.y];
  float* const ranked_score = sorted_score[threadIdx.y];
  clear_counts(count, a.E);

  float bias[kPerLane];  // -inf where there is no expert
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = expert_of<L>(i, part);
    bias[i] = e < a.E ? a.bias[e] : -INFINITY;
  }

  const int64_t stride = int64_t{gridDim.x} * (kRouteWarps * kTokens);
  for (int64_t base = (int64_t{blockIdx.x} * kRouteWarps + threadIdx.y) * kTokens; base < a.N; base += stride) {
    const int64_t n = base + token;
    const bool exists = n < a.N, routed = exists && a.routed(n);
    const float* z = a.logits + n * a.logits_ld;
    float v[kPerLane];
#pragma unroll
    for (int p = 0; p < kPerLane / 4; ++p) {
      const int e = expert_of<L>(4 * p, part);
      float x[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (wide) {
        if (routed && e < a.E) load<4>(x, z + e);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (routed && e + c < a.E) x[c] = z[e + c];
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) v[4 * p + c] = x[c];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = router_score(v[i]) + bias[i];

    float top[kList], other[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) top[i] = v[i], other[i] = v[kList + i];
    sort8(top);
    sort8(other);
#pragma unroll
    for (int i = 0; i < kList; ++i) top[i] = fmaxf(top[i], other[kList - 1 - i]);
    merge8(top);
#pragma unroll
    for (int d = 1; d < L; d *= 2) {
#pragma unroll
      for (int i = 0; i < kList; ++i) other[i] = __shfl_xor_sync(kAllLanes, top[i], d);
#pragma unroll
      for (int i = 0; i < kList; ++i) top[i] = fmaxf(top[i], other[kList - 1 - i]);
      merge8(top);
    }

    float kth = top[0];
    bool distinct = true;
#pragma unroll
    for (int i = 1; i < kList; ++i) {
      if (i >= a.k) continue;
      distinct = distinct && top[i - 1] > top[i];
      kth = top[i];
    }
    unsigned reach = 0;
    float cutoff = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (v[i] >= kth) {
        reach |= 1u << i;
      } else {
        cutoff = fmaxf(cutoff, v[i]);
      }
    }
    const int found = __popc(reach);
    int upto = found;  // inclusive sum over the lanes of the token
#pragma unroll
    for (int d = 1; d < L; d *= 2) {
      const int left = __shfl_up_sync(kAllLanes, upto, d, L);
      if (part >= d) upto += left;
      cutoff = fmaxf(cutoff, __shfl_xor_sync(kAllLanes, cutoff, d));
    }
    const int total = __shfl_sync(kAllLanes, upto, L - 1, L);
    const bool plain = routed && distinct && total == a.k && cutoff > -INFINITY;

    if (plain) {
      for (int to = upto - found; reach != 0; reach &= reach - 1, ++to) mine[to] = expert_of<L>(__ffs(reach) - 1, part);
    }
    __syncwarp();
    if (plain) {
      for (int j = part; j < a.k; j += L) {
        const int e = mine[j];
        const float s = router_score(z[e]), value = s + a.bias[e];
        int rank = 0;
#pragma unroll
        for (int i = 0; i < kList; ++i) rank += top[i] > value ? 1 : 0;
        ranked[token * kList + rank] = e;
        ranked_score[token * kList + rank] = s;
      }
      if (part == 0) a.cutoff[n] = cutoff;
    }
    __syncwarp();

    const unsigned plain_lanes = __ballot_sync(kAllLanes, plain), all = __ballot_sync(kAllLanes, routed);
    for (int f = lane; f < kTokens * kList; f += kWarp) {
      const int t = f / kList, j = f % kList;
      if (j >= a.k || (plain_lanes >> (t * L) & 1) == 0) continue;
      float sum = kTinySum;
      for (int i = 0; i < a.k; ++i) sum += ranked_score[t * kList + i];
      const float s = ranked_score[f];
      const int64_t to = base + t;
      a.index[to * a.index_ld + j] = ranked[f];
      a.score[to * a.score_ld + j] = s;
      a.weight[to * a.weight_ld + j] = s * (a.renormalize ? a.scaling / sum : a.scaling);
      atomicAdd(count + ranked[f], 1);
    }
    for (int t = 0; t < kTokens && base + t < a.N; ++t) {
      if (plain_lanes >> (t * L) & 1) continue;
      if (all >> (t * L) & 1) {
        RoundsInMemory experts(a.logits + (base + t) * a.logits_ld, a.bias, a.E);
        route_by_rounds(a, base + t, experts, count);
      } else {
        route_nowhere(a, base + t);
      }
    }
    __syncwarp();
  }
  add_counts(a.load, count, a.E);
}

template <int L>
void launch(Stream& s, const RouteArguments& a) {
  const int64_t blocks = divide_up(a.N, kRouteWarps * (kWarp / L)), most = int64_t{6} * multiprocessors();
  const bool aligned =
      reinterpret_cast<uintptr_t>(a.logits) % 16 == 0 && a.E % 4 == 0 && (a.logits_ld % 4 == 0 || a.N == 1);
  const auto kernel = aligned ? route_network_kernel<L, true> : route_network_kernel<L, false>;
  kernel<<<static_cast<unsigned>(blocks < most ? blocks : most), dim3(kWarp, kRouteWarps), 0, cuda_stream(s)>>>(a);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool route_by_network(Stream& s, const RouteArguments& a) {
  if (a.threshold || a.k > kList || a.k >= a.E || a.E > 8 * kPerLane) return false;
  if (a.E <= kPerLane) {
    launch<1>(s, a);
  } else if (a.E <= 2 * kPerLane) {
    launch<2>(s, a);
  } else if (a.E <= 4 * kPerLane) {
    launch<4>(s, a);
  } else {
    launch<8>(s, a);
  }
  return true;
}

}  // namespace kestrel::cuda
