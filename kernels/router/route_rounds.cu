// Routing of any kind: a warp per token, one round per choice.
//
// A round takes the largest key (one integer reduction), of equal ones the smallest index (another), and the owner
// forgets it.  Keys of up to 1024 experts stay in registers, expert e in lane e mod 32; with more, a round reads the
// logits again.
#include "kernels/router/route.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kMostInRegisters = 32;  // experts per lane
constexpr int kMostShared = 8192;     // counts of a block in shared memory, else in `load` at once

// Up to R experts per lane, in registers.
template <int R>
struct Registers {
  int key[R];
  float score[R];
  unsigned taken = 0;

  __device__ __forceinline__ Registers(const float* logits, const float* bias, int E) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int e = threadIdx.x + r * kWarp;
      if (e < E) {
        score[r] = router_score(logits[e]);
        key[r] = order_key(score[r] + bias[e]);
      } else {
        score[r] = 0.f;
        key[r] = INT_MIN;
        taken |= 1u << r;
      }
    }
  }
  __device__ __forceinline__ Best next() {
    Best mine{INT_MIN, INT_MAX, 0.f};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!(taken >> r & 1) && (mine.expert == INT_MAX || key[r] > mine.key)) {
        mine = {key[r], static_cast<int>(threadIdx.x) + r * kWarp, score[r]};
      }
    }
    const Best best = best_of_warp(mine);
    if (best.expert == mine.expert && best.expert != INT_MAX) taken |= 1u << (best.expert / kWarp);
    return best;
  }
};
template <>
struct Registers<0> : RoundsInMemory {
  using RoundsInMemory::RoundsInMemory;
};

template <int R>
__global__ void __launch_bounds__(kWarp* kRouteWarps) route_rounds_kernel(const RouteArguments a, bool shared_counts) {
  extern __shared__ int32_t counts[];  // [E] or nothing
  int32_t* const count = shared_counts ? counts : a.load;
  if (shared_counts) clear_counts(counts, a.E);
  for (int64_t n = int64_t{blockIdx.x} * kRouteWarps + threadIdx.y; n < a.N; n += int64_t{gridDim.x} * kRouteWarps) {
    if (a.routed(n)) {
      Registers<R> experts(a.logits + n * a.logits_ld, a.bias, a.E);
      route_by_rounds(a, n, experts, count);
    } else {
      route_nowhere(a, n);
    }
  }
  if (shared_counts) add_counts(a.load, counts, a.E);
}

template <int R>
void launch(Stream& s, const RouteArguments& a) {
  const bool shared_counts = a.E <= kMostShared;
  const int64_t blocks = divide_up(a.N, kRouteWarps), most = int64_t{8} * multiprocessors();
  route_rounds_kernel<R>
      <<<static_cast<unsigned>(blocks < most ? blocks : most), dim3(kWarp, kRouteWarps),
         shared_counts ? sizeof(int32_t) * static_cast<size_t>(a.E) : 0, cuda_stream(s)>>>(a, shared_counts);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void route_by_rounds(Stream& s, const RouteArguments& a) {
  const int per_lane = (a.E + kWarp - 1) / kWarp;
  if (per_lane <= 4) return launch<4>(s, a);
  if (per_lane <= 16) return launch<16>(s, a);
  if (per_lane <= kMostInRegisters) return launch<kMostInRegisters>(s, a);
  launch<0>(s, a);
}

}  // namespace kestrel::cuda
