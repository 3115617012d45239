// The dispatch plan: a stable counting sort of (token, slot) pairs by expert.
//
//   1. count    a block takes a piece of pairs and counts them by expert               counts [pieces, E]
//   2. scan     per expert, exclusive sums over the pieces, in place                   totals [E]
//   3. offsets  exclusive sums over the experts                                        offsets [E+1]
//   4. place    a block counts its piece again, now by warp; a pair's row is the expert's offset, plus what earlier
//               pieces and earlier warps of the piece hold of the expert, plus what lies before the pair in its warp
// Integers throughout: the plan is the CPU's, bit for bit.  Bound by latency: 8 bytes read and 8 written per pair.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kRounds = DispatchCut::kPairsPerWarp / kWarp;  // pairs of a lane
constexpr int kMostThreads = DispatchCut::kMostWarps * kWarp;

// index [N, slots], its pairs numbered row by row.  There are less than 2^31.
struct Pairs {
  const int32_t* index;
  int64_t ld;
  unsigned slots, count;
  int E;

  // The pair's expert, or -1: unused, or an index outside [0, E) (which the CPU refuses; here nobody waits to hear it).
  // Without branches, so that the loads of several pairs are in flight together.
  __device__ __forceinline__ int expert(unsigned pair) const {
    const unsigned at = pair < count ? pair : 0, n = at / slots;
    const int e = index[n * ld + (at - n * slots)];
    return pair < count && e >= 0 && e < E ? e : -1;
  }
};

// Round 0 of this thread's pairs: round k is 32 k further, a warp's pairs lie side by side.
__device__ __forceinline__ unsigned first_pair() {
  const unsigned warp = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  return warp * DispatchCut::kPairsPerWarp + threadIdx.x % kWarp;
}

__global__ void __launch_bounds__(kMostThreads) count_kernel(int32_t* counts, Pairs pairs) {
  extern __shared__ int32_t shared[];  // [E]
  const int E = pairs.E;
  for (int e = threadIdx.x; e < E; e += blockDim.x) shared[e] = 0;
  int expert[kRounds];
#pragma unroll
  for (int k = 0; k < kRounds; ++k) expert[k] = pairs.expert(first_pair() + k * kWarp);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    if (expert[k] >= 0) atomicAdd(shared + expert[k], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) counts[int64_t{blockIdx.x} * E + e] = shared[e];
}

// Block: 32 experts (x) by 32 runs of pieces (y).
__global__ void __launch_bounds__(kWarp* kWarp) scan_kernel(int32_t* counts, int32_t* totals, int64_t pieces, int E) {
  constexpr int kTogether = 8;  // loads in flight
  __shared__ int32_t sums[kWarp][kWarp];
  const int e = blockIdx.x * kWarp + threadIdx.x;
  const int64_t run = (pieces + kWarp - 1) / kWarp;
  const int64_t first = threadIdx.y * run, last = first + run < pieces ? first + run : pieces;
  int32_t sum = 0;
  if (e < E) {
#pragma unroll 8
    for (int64_t p = first; p < last; ++p) sum += counts[p * E + e];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (e >= E) return;
  int32_t before = 0;
  for (int y = 0; y < static_cast<int>(threadIdx.y); ++y) before += sums[y][threadIdx.x];
  if (threadIdx.y == kWarp - 1) totals[e] = before + sum;
  for (int64_t p = first; p < last; p += kTogether) {
    int32_t here[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) here[i] = p + i < last ? counts[(p + i) * E + e] : 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (p + i < last) counts[(p + i) * E + e] = before;
      before += here[i];
    }
  }
}

// One block: exclusive sums, 1024 experts at a time.
__global__ void __launch_bounds__(kWarp* kWarp) offsets_kernel(int64_t* offsets, const int32_t* totals, int E) {
  __shared__ int32_t warps[kWarp];  // sums of the warps' totals up to each warp
  const int warp = threadIdx.x / kWarp;
  int32_t before = 0;
  for (int first = 0; first < E; first += kWarp * kWarp) {
    const int e = first + threadIdx.x;
    const int32_t here = e < E ? totals[e] : 0;
    const int32_t sum = warp_scan(here);
    if (threadIdx.x % kWarp == kWarp - 1) warps[warp] = sum;
    __syncthreads();
    if (warp == 0) warps[threadIdx.x] = warp_scan(warps[threadIdx.x]);
    __syncthreads();
    if (e < E) offsets[e] = before + (warp > 0 ? warps[warp - 1] : 0) + sum - here;
    before += warps[kWarp - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[E] = before;
}

__global__ void __launch_bounds__(kMostThreads)
    place_kernel(int32_t* row_of, int64_t row_ld, int32_t* token_of, Pairs pairs, const int32_t* counts,
                 const int64_t* offsets) {
  extern __shared__ int32_t shared[];  // [warps, E]: first the warp's count, then its next row of each expert
  const int E = pairs.E, warps = blockDim.x / kWarp;
  int32_t* next = shared + threadIdx.x / kWarp * E;
  for (int i = threadIdx.x; i < warps * E; i += blockDim.x) shared[i] = 0;
  int expert[kRounds];
#pragma unroll
  for (int k = 0; k < kRounds; ++k) expert[k] = pairs.expert(first_pair() + k * kWarp);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    if (expert[k] >= 0) atomicAdd(next + expert[k], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) {
    int32_t row = static_cast<int32_t>(offsets[e]) + counts[int64_t{blockIdx.x} * E + e];
    for (int w = 0; w < warps; ++w) {
      const int32_t count = shared[w * E + e];
      shared[w * E + e] = row;
      row += count;
    }
  }
  __syncthreads();
  const unsigned before_me = (1u << (threadIdx.x % kWarp)) - 1;
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const unsigned pair = first_pair() + k * kWarp;
    const int e = expert[k];
    const unsigned same = __match_any_sync(0xffffffffu, e);
    const int32_t row = e >= 0 ? next[e] + __popc(same & before_me) : -1;
    __syncwarp();
    if (e >= 0 && (same & before_me) == 0) next[e] += __popc(same);
    __syncwarp();
    if (pair >= pairs.count) continue;
    const unsigned n = pair / pairs.slots;
    row_of[n * row_ld + (pair - n * pairs.slots)] = row;
    if (row >= 0) token_of[row] = static_cast<int32_t>(n);
  }
}

template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  constexpr size_t kPlainShared = 48 << 10;
  if (bytes <= kPlainShared) return;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace

void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index, const DispatchCut& cut, Tensor counts,
                   Tensor totals) {
  const cudaStream_t stream = cuda_stream(s);
  const int E = static_cast<int>(plan.experts());
  const Pairs pairs{index.i32(), index.ld, static_cast<unsigned>(plan.slots()), static_cast<unsigned>(plan.max_rows()),
                    E};
  const unsigned blocks = static_cast<unsigned>(cut.pieces), threads = static_cast<unsigned>(cut.warps * kWarp);
  const size_t per_warp = sizeof(int32_t) * static_cast<size_t>(E),
               per_block = per_warp * static_cast<size_t>(cut.warps);
  if (blocks > 0) {
    allow_shared(count_kernel, per_warp);
    count_kernel<<<blocks, threads, per_warp, stream>>>(counts.i32(), pairs);
    CUDA_CHECK(cudaGetLastError());
  }
  scan_kernel<<<static_cast<unsigned>(divide_up(E, kWarp)), dim3(kWarp, kWarp), 0, stream>>>(counts.i32(), totals.i32(),
                                                                                             cut.pieces, E);
  CUDA_CHECK(cudaGetLastError());
  offsets_kernel<<<1, kWarp * kWarp, 0, stream>>>(plan.offsets.as<int64_t>(), totals.i32(), E);
  CUDA_CHECK(cudaGetLastError());
  if (blocks == 0) return;
  allow_shared(place_kernel, per_block);
  place_kernel<<<blocks, threads, per_block, stream>>>(plan.row_of.i32(), plan.row_of.ld, plan.token_of.i32(), pairs,
                                                       counts.i32(), plan.offsets.as<int64_t>());
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
