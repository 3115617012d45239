// The dispatch plan: a stable counting sort of (token, slot) pairs by expert.
//
//   1. count    a warp takes a piece of 256 pairs and counts them by expert            counts [pieces, E]
//   2. scan     per expert, exclusive sums over the pieces, in place                   totals [E]
//   3. offsets  exclusive sums over the experts                                        offsets [E+1]
//   4. place    a warp goes through its piece again, 32 pairs at a time: a pair's row is the expert's offset, plus what
//               earlier pieces hold of the expert, plus what lies before the pair in this piece
// Integers throughout: the plan is the CPU's, bit for bit.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

// The pair's expert, or -1: unused, or an index outside [0, E) (which the CPU refuses; here nobody waits to hear it).
__device__ __forceinline__ int expert_of(const int32_t* index, int64_t ld, int64_t slots, int64_t pair, int64_t pairs,
                                         int E) {
  if (pair >= pairs) return -1;
  const int e = index[pair / slots * ld + pair % slots];
  return e >= 0 && e < E ? e : -1;
}

__global__ void count_kernel(int32_t* counts, const int32_t* index, int64_t ld, int64_t slots, int64_t pairs,
                             int64_t pieces, int E) {
  extern __shared__ int32_t shared[];  // [warps, E]
  int32_t* mine = shared + threadIdx.y * E;
  const int64_t piece = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
  for (int e = threadIdx.x; e < E; e += kWarp) mine[e] = 0;
  __syncwarp();
  for (int64_t i = 0; i < kPairsPerPiece; i += kWarp) {
    const int e = expert_of(index, ld, slots, piece * kPairsPerPiece + i + threadIdx.x, pairs, E);
    if (e >= 0) atomicAdd(mine + e, 1);
  }
  __syncwarp();
  if (piece >= pieces) return;
  for (int e = threadIdx.x; e < E; e += kWarp) counts[piece * E + e] = mine[e];
}

// Block: 32 experts (x) by 32 runs of pieces (y).
__global__ void scan_kernel(int32_t* counts, int32_t* totals, int64_t pieces, int E) {
  __shared__ int32_t sums[kWarp][kWarp + 1];
  const int e = blockIdx.x * kWarp + threadIdx.x;
  const int64_t run = (pieces + kWarp - 1) / kWarp;
  const int64_t first = threadIdx.y * run, last = first + run < pieces ? first + run : pieces;
  int32_t sum = 0;
  if (e < E) {
    for (int64_t p = first; p < last; ++p) sum += counts[p * E + e];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (e >= E) return;
  int32_t before = 0;
  for (int y = 0; y < static_cast<int>(threadIdx.y); ++y) before += sums[y][threadIdx.x];
  if (threadIdx.y == kWarp - 1) totals[e] = before + sum;
  for (int64_t p = first; p < last; ++p) {
    const int32_t here = counts[p * E + e];
    counts[p * E + e] = before;
    before += here;
  }
}

// One warp: exclusive sums of 32 experts at a time.
__global__ void offsets_kernel(int64_t* offsets, const int32_t* totals, int E) {
  int64_t before = 0;
  for (int first = 0; first < E; first += kWarp) {
    const int e = first + threadIdx.x;
    const int64_t here = e < E ? totals[e] : 0;
    int64_t sum = here;  // inclusive
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, sum, step);
      if (static_cast<int>(threadIdx.x) >= step) sum += left;
    }
    if (e < E) offsets[e] = before + sum - here;
    before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  if (threadIdx.x == 0) offsets[E] = before;
}

__global__ void place_kernel(int32_t* row_of, int64_t row_ld, int32_t* token_of, const int32_t* index, int64_t ld,
                             const int32_t* counts, const int64_t* offsets, int64_t slots, int64_t pairs,
                             int64_t pieces, int E) {
  extern __shared__ int32_t shared[];  // [warps, E]: the next row of each expert
  int32_t* next = shared + threadIdx.y * E;
  const int64_t piece = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
  if (piece >= pieces) return;
  for (int e = threadIdx.x; e < E; e += kWarp) next[e] = static_cast<int32_t>(offsets[e]) + counts[piece * E + e];
  __syncwarp();
  const unsigned before_me = (1u << threadIdx.x) - 1;
  for (int64_t i = 0; i < kPairsPerPiece; i += kWarp) {
    const int64_t pair = piece * kPairsPerPiece + i + threadIdx.x;
    const int e = expert_of(index, ld, slots, pair, pairs, E);
    const unsigned same = __match_any_sync(0xffffffffu, e);
    const int32_t row = e >= 0 ? next[e] + __popc(same & before_me) : -1;
    __syncwarp();
    if (e >= 0 && (same & before_me) == 0) next[e] += __popc(same);
    __syncwarp();
    if (pair >= pairs) continue;
    row_of[pair / slots * row_ld + pair % slots] = row;
    if (row >= 0) token_of[row] = static_cast<int32_t>(pair / slots);
  }
}

}  // namespace

void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index, Tensor counts, Tensor totals) {
  const int64_t slots = plan.slots(), pairs = plan.max_rows(), pieces = dispatch_pieces(pairs);
  const int E = static_cast<int>(plan.experts());
  const cudaStream_t stream = cuda_stream(s);
  const dim3 block(kWarp, kWarpsPerBlock);
  const size_t shared = sizeof(int32_t) * kWarpsPerBlock * static_cast<size_t>(E);
  const unsigned blocks = static_cast<unsigned>(divide_up(pieces, kWarpsPerBlock));
  constexpr size_t kPlainShared = 48 << 10;
  if (shared > kPlainShared) {
    CUDA_CHECK(
        cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    CUDA_CHECK(
        cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  if (pieces > 0) {
    count_kernel<<<blocks, block, shared, stream>>>(counts.i32(), index.i32(), index.ld, slots, pairs, pieces, E);
    CUDA_CHECK(cudaGetLastError());
  }
  scan_kernel<<<static_cast<unsigned>(divide_up(E, kWarp)), dim3(kWarp, kWarp), 0, stream>>>(counts.i32(), totals.i32(),
                                                                                             pieces, E);
  CUDA_CHECK(cudaGetLastError());
  offsets_kernel<<<1, kWarp, 0, stream>>>(plan.offsets.as<int64_t>(), totals.i32(), E);
  CUDA_CHECK(cudaGetLastError());
  if (pieces == 0) return;
  place_kernel<<<blocks, block, shared, stream>>>(plan.row_of.i32(), plan.row_of.ld, plan.token_of.i32(), index.i32(),
                                                  index.ld, counts.i32(), plan.offsets.as<int64_t>(), slots, pairs,
                                                  pieces, E);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
