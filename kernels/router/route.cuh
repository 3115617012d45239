// What the three kernels of route_forward share: arguments, and routing of one token by rounds.
#pragma once

#include "kernels/router/router.cuh"

namespace kestrel::cuda {

constexpr int kRouteWarps = 8;  // per block, threadIdx = (lane, warp)

struct RouteArguments {
  int32_t* index;                  // [N, slots]
  float *weight, *score, *cutoff;  // [N, slots] twice, [N]; cutoff null with threshold
  int32_t* load;                   // [E]
  const float *logits, *bias;      // [N, E], [E]
  const uint8_t* valid;            // [N] or null
  int64_t index_ld, weight_ld, score_ld, logits_ld, N;
  int E, k, slots;
  bool threshold, renormalize;
  float scaling;

  __device__ __forceinline__ bool routed(int64_t n) const { return valid == nullptr || valid[n] != 0; }
};

struct Best {
  int key, expert;
  float score;
};

// The best of what the lanes offer (expert INT_MAX: nothing): the same in every lane.
__device__ __forceinline__ Best best_of_warp(const Best& mine) {
  const int key = __reduce_max_sync(kAllLanes, mine.key);
  const int expert = __reduce_min_sync(kAllLanes, mine.key == key ? mine.expert : INT_MAX);
  const unsigned owner = __ballot_sync(kAllLanes, mine.key == key && mine.expert == expert);
  return {key, expert, __shfl_sync(kAllLanes, mine.score, __ffs(owner) - 1)};
}

// Rounds over the logits in memory: each takes the best that comes after the last one in the order (key falling, index
// rising).  Any number of experts, ties, NaN.
struct RoundsInMemory {
  const float *logits, *bias;
  int E;
  Best last{INT_MAX, -1, 0.f};

  __device__ __forceinline__ RoundsInMemory(const float* l, const float* b, int experts)
      : logits(l), bias(b), E(experts) {}
  __device__ __forceinline__ Best next() {
    Best mine{INT_MIN, INT_MAX, 0.f};
    for (int e = threadIdx.x; e < E; e += kWarp) {
      const float score = router_score(logits[e]);
      const int key = order_key(score + bias[e]);
      const bool after = key < last.key || (key == last.key && e > last.expert);
      if (after && (mine.expert == INT_MAX || key > mine.key)) mine = {key, e, score};
    }
    last = best_of_warp(mine);
    return last;
  }
};

// One token by one warp.  count: [E], in shared or global memory.
template <class Rounds>
__device__ __forceinline__ void route_by_rounds(const RouteArguments& a, int64_t n, Rounds& experts, int32_t* count) {
  int32_t* index = a.index + n * a.index_ld;
  float *weight = a.weight + n * a.weight_ld, *score = a.score + n * a.score_ld;
  const int zero = order_key(0.f), rounds = a.threshold ? a.slots : (a.k < a.E ? a.k + 1 : a.k);
  int used = 0;
  float sum = kTinySum, cutoff = -INFINITY;
  for (int j = 0; j < rounds; ++j) {
    const Best best = experts.next();
    if (best.expert == INT_MAX || (a.threshold && best.key <= zero)) break;
    if (!a.threshold && j == a.k) {
      cutoff = value_of_key(best.key);
      break;
    }
    if (threadIdx.x == 0) {
      index[j] = best.expert;
      score[j] = best.score;
      atomicAdd(count + best.expert, 1);
    }
    sum += best.score;
    ++used;
  }
  __syncwarp();
  const float factor = a.renormalize ? a.scaling / sum : a.scaling;
  for (int j = threadIdx.x; j < a.slots; j += kWarp) {
    if (j < used) {
      weight[j] = score[j] * factor;
    } else {
      index[j] = -1;
      score[j] = 0.f;
      weight[j] = 0.f;
    }
  }
  if (threadIdx.x == 0 && !a.threshold) a.cutoff[n] = cutoff;
}

// A token that is not valid, by one warp.
__device__ __forceinline__ void route_nowhere(const RouteArguments& a, int64_t n) {
  for (int j = threadIdx.x; j < a.slots; j += kWarp) {
    a.index[n * a.index_ld + j] = -1;
    a.score[n * a.score_ld + j] = 0.f;
    a.weight[n * a.weight_ld + j] = 0.f;
  }
  if (threadIdx.x == 0 && !a.threshold) a.cutoff[n] = __int_as_float(0x7fc00000);
}

// Counts of a block: zeroed before, added to `load` after.
__device__ __forceinline__ void clear_counts(int32_t* count, int E) {
  for (int e = threadIdx.y * kWarp + threadIdx.x; e < E; e += kWarp * kRouteWarps) count[e] = 0;
  __syncthreads();
}
__device__ __forceinline__ void add_counts(int32_t* load, const int32_t* count, int E) {
  __syncthreads();
  for (int e = threadIdx.y * kWarp + threadIdx.x; e < E; e += kWarp * kRouteWarps) {
    if (count[e] > 0) atomicAdd(load + e, count[e]);
  }
}

// The kernels.  Each says whether it takes the case, and has launched when it does.
bool route_by_network(Stream& s, const RouteArguments& a);     // route_network.cu: top_k, few experts
bool route_by_candidates(Stream& s, const RouteArguments& a);  // route_candidates.cu: up to 1024 experts
void route_by_rounds(Stream& s, const RouteArguments& a);      // route_rounds.cu: everything

}  // namespace kestrel::cuda
