// Routing among up to 1024 experts: a warp per token, expert e in lane e mod 32, values in registers.
//
// A bound first: with m the number of experts wanted (k and the cutoff's), the m-th largest of the lanes' largest
// values is reached by at least m experts, and by few more: about 32 ln(32 / (32.5 - m)), 23 for m = 17.  Those are
// collected, one per lane, and sorted by (value falling, index rising) across the lanes; then lane j holds the j-th
// choice.  With `threshold` the candidates are the experts above zero.  More than 32 candidates (some percent of the
// tokens at m = 17, half of them at m = 21), or fewer than m numbers: by rounds over the registers.
#include "kernels/router/route.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kMost = 32;        // candidates; registers per lane
constexpr int kMostWanted = 20;  // beyond, the bound lets too many pass (up to 32 experts need none)

// Falling over the lanes.
__device__ __forceinline__ float sort_lanes(float x) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2) {
#pragma unroll
    for (int d = size / 2; d > 0; d /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, x, d);
      const bool keep_larger = ((lane & d) == 0) == ((lane & size) == 0);
      x = keep_larger ? fmaxf(x, other) : fminf(x, other);
    }
  }
  return x;
}
// Key falling, then tag rising; tags are distinct.
__device__ __forceinline__ void sort_lanes(int& key, int& tag) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2) {
#pragma unroll
    for (int d = size / 2; d > 0; d /= 2) {
      const int other_key = __shfl_xor_sync(kAllLanes, key, d), other_tag = __shfl_xor_sync(kAllLanes, tag, d);
      const bool better = key > other_key || (key == other_key && tag < other_tag);
      const bool keep_better = ((lane & d) == 0) == ((lane & size) == 0);
      if (better != keep_better) key = other_key, tag = other_tag;
    }
  }
}

// Rounds over the values at hand; the score of a winner is made again from its logit.
template <int R>
struct RoundsInRegisters {
  const float (&value)[R];
  const float* logits;
  unsigned taken;

  __device__ __forceinline__ Best next() {
    Best mine{INT_MIN, INT_MAX, 0.f};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int key = order_key(value[r]);
      if (!(taken >> r & 1) && (mine.expert == INT_MAX || key > mine.key)) {
        mine.key = key;
        mine.expert = static_cast<int>(threadIdx.x) + r * kWarp;
      }
    }
    Best best = best_of_warp(mine);
    if (best.expert == INT_MAX) return best;
    if (best.expert == mine.expert) taken |= 1u << (best.expert / kWarp);
    best.score = router_score(logits[best.expert]);
    return best;
  }
};

template <int R>
__global__ void __launch_bounds__(kWarp* kRouteWarps, 2) route_candidates_kernel(const RouteArguments a) {
  extern __shared__ int32_t count[];  // [E]
  __shared__ int found_by[kRouteWarps][kMost];
  const int lane = threadIdx.x;
  int* const list = found_by[threadIdx.y];
  clear_counts(count, a.E);

  float bias[R];
  unsigned real = 0;  // registers with an expert
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int e = lane + r * kWarp;
    bias[r] = e < a.E ? a.bias[e] : -INFINITY;
    real |= (e < a.E ? 1u : 0u) << r;
  }
  const int wanted = a.threshold ? 0 : (a.k < a.E ? a.k + 1 : a.k);

  for (int64_t n = int64_t{blockIdx.x} * kRouteWarps + threadIdx.y; n < a.N; n += int64_t{gridDim.x} * kRouteWarps) {
    if (!a.routed(n)) {
      route_nowhere(a, n);
      continue;
    }
    const float* z = a.logits + n * a.logits_ld;
    float v[R];
#pragma unroll
    for (int r = 0; r < R; ++r) v[r] = lane + r * kWarp < a.E ? z[lane + r * kWarp] : 0.f;
#pragma unroll
    for (int r = 0; r < R; ++r) v[r] = router_score(v[r]) + bias[r];

    unsigned reach = 0;
    if (a.threshold) {
#pragma unroll
      for (int r = 0; r < R; ++r) reach |= (v[r] > 0.f ? 1u : 0u) << r;
    } else {
      float bound = -INFINITY;
      if constexpr (R > 1) {
        float most = -INFINITY;
#pragma unroll
        for (int r = 0; r < R; ++r) most = fmaxf(most, v[r]);
        bound = __shfl_sync(kAllLanes, sort_lanes(most), wanted - 1);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) reach |= (v[r] >= bound ? 1u : 0u) << r;
    }
    reach &= real;
    const int found = __popc(reach);
    const int upto = warp_scan(found);
    const int total = __shfl_sync(kAllLanes, upto, kWarp - 1);
    if (total > kMost || total < wanted) {
      RoundsInRegisters<R> experts{v, z, ~real};
      route_by_rounds(a, n, experts, count);
      continue;
    }
    for (int to = upto - found; reach != 0; reach &= reach - 1, ++to) list[to] = lane + (__ffs(reach) - 1) * kWarp;
    __syncwarp();
    // Tag: expert, then the lane that has its score.
    int key = INT_MIN, tag = (1 << 20) + lane;
    float s = 0.f;
    if (lane < total) {
      const int e = list[lane];
      s = router_score(z[e]);
      key = order_key(s + a.bias[e]);
      tag = e * kWarp + lane;
    }
    __syncwarp();
    sort_lanes(key, tag);
    s = __shfl_sync(kAllLanes, s, tag % kWarp);

    const int used = a.threshold ? (total < a.slots ? total : a.slots) : a.k;
    float sum = kTinySum;
    for (int j = 0; j < used; ++j) sum += __shfl_sync(kAllLanes, s, j);
    const float factor = a.renormalize ? a.scaling / sum : a.scaling;
    for (int j = lane; j < a.slots; j += kWarp) {  // used <= 32: only the first turn has choices
      a.index[n * a.index_ld + j] = j < used ? tag / kWarp : -1;
      a.score[n * a.score_ld + j] = j < used ? s : 0.f;
      a.weight[n * a.weight_ld + j] = j < used ? s * factor : 0.f;
    }
    if (lane < used) atomicAdd(count + tag / kWarp, 1);
    if (!a.threshold) {
      const int last = __shfl_sync(kAllLanes, key, wanted - 1);
      if (lane == 0) a.cutoff[n] = wanted > a.k ? value_of_key(last) : -INFINITY;
    }
  }
  add_counts(a.load, count, a.E);
}

template <int R>
bool launch(Stream& s, const RouteArguments& a) {
  const int64_t blocks = divide_up(a.N, kRouteWarps), most = int64_t{R > 16 ? 2 : 4} * multiprocessors();
  route_candidates_kernel<R><<<static_cast<unsigned>(blocks < most ? blocks : most), dim3(kWarp, kRouteWarps),
                               sizeof(int32_t) * static_cast<size_t>(a.E), cuda_stream(s)>>>(a);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

}  // namespace

bool route_by_candidates(Stream& s, const RouteArguments& a) {
  const int wanted = a.k < a.E ? a.k + 1 : a.k, per_lane = (a.E + kWarp - 1) / kWarp;
  if (per_lane > kMost || (!a.threshold && wanted > (per_lane == 1 ? kMost : kMostWanted))) return false;
  if (per_lane <= 1) return launch<1>(s, a);
  if (per_lane <= 2) return launch<2>(s, a);
  if (per_lane <= 4) return launch<4>(s, a);
  if (per_lane <= 8) return launch<8>(s, a);
  if (per_lane <= 16) return launch<16>(s, a);
  if (per_lane <= 28) return launch<28>(s, a);
  return launch<32>(s, a);
}

}  // namespace kestrel::cuda
