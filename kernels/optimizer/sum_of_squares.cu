// 4 bytes and one fp64 multiply-add per element: bound by memory.  Every tensor is cut into pieces of fixed size, one
// block each, for up to kRuns tensors in a launch; a last block adds the sums of the pieces.  So the bits depend on the
// sizes alone.  No finite float's square leaves the range of fp64: the sum is finite exactly when every element is.
#include "kernels/optimizer/optimizer_cuda.h"
#include "kernels/optimizer/sums.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPackets = 8;  // in flight per thread
constexpr int kRounds = 2;
constexpr int64_t kPiece = int64_t{kThreads} * kPacket * kPackets * kRounds;  // 16384 elements
constexpr int kRuns = 64;                                                     // tensors per launch
constexpr int kFinishThreads = 1024;

struct Run {
  const float* data;
  int64_t n, cols, ld;
  int64_t first_piece;  // of this launch
  bool dense, wide;
};
struct Runs {
  Run run[kRuns];
  int count;
};
static_assert(sizeof(Runs) <= 4000, "kernel parameters are limited to 4 KB");

__device__ const Run& run_of(const Runs& runs, int64_t piece) {
  int low = 0, high = runs.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (runs.run[middle].first_piece <= piece) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return runs.run[low];
}

// Elements at .. at + 3 of a run, in row order.
__device__ __forceinline__ void load_run(float (&x)[kPacket], const Run& run, int64_t at) {
  const int64_t left = run.n - at;
  if (run.dense) return load_packet(x, run.data + at, left, run.wide && left >= kPacket);
  if (run.wide) return load_packet(x, run.data + at / run.cols * run.ld + at % run.cols, left, true);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    x[j] = j < left ? run.data[(at + j) / run.cols * run.ld + (at + j) % run.cols] : 0.f;
  }
}

__global__ void __launch_bounds__(kThreads) sum_pieces_kernel(const __grid_constant__ Runs runs, double* partial) {
  __shared__ double warps[kThreads / kWarp];
  const Run& run = run_of(runs, blockIdx.x);
  int64_t at = (blockIdx.x - run.first_piece) * kPiece + threadIdx.x * kPacket;
  double sum[kPacket] = {};
  for (int round = 0; round < kRounds; ++round) {
    float x[kPackets][kPacket];
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int64_t here = at + k * (kThreads * kPacket);
      if (here < run.n) {
        load_run(x[k], run, here);
      } else {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) x[k][j] = 0.f;
      }
    }
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) sum[j] += static_cast<double>(x[k][j]) * static_cast<double>(x[k][j]);
    }
    at += kPackets * kThreads * kPacket;
  }
  const double all = block_sum<kThreads>((sum[0] + sum[1]) + (sum[2] + sum[3]), warps);
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kFinishThreads)
    add_pieces_kernel(double* out, const double* partial, int64_t pieces) {
  __shared__ double warps[kFinishThreads / kWarp];
  const double all = sum_of_pieces<kFinishThreads>(partial, pieces, warps);
  if (threadIdx.x == 0) *out += all;
}

Run run_from(const Tensor& t, int64_t first_piece) {
  const bool dense = t.contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return {t.f32(),
          t.numel(),
          t.cols(),
          t.ld,
          first_piece,
          dense,
          aligned && (dense || (t.cols() % kPacket == 0 && t.ld % kPacket == 0))};
}

}  // namespace

void sum_of_squares(Stream& s, Tensor out, const std::vector<Tensor>& tensors) {
  int64_t pieces = 0;
  for (const Tensor& t : tensors) pieces += divide_up(t.numel(), kPiece);
  if (pieces == 0) return;
  const ScratchScope scope(s);
  const Tensor partial = s.temp({pieces}, DType::f64);
  if (s.planning()) return;
  const cudaStream_t stream = cuda_stream(s);

  double* to = partial.as<double>();
  Runs runs{};
  int64_t queued = 0;  // pieces of `runs`
  const auto launch = [&] {
    if (queued == 0) return;
    sum_pieces_kernel<<<static_cast<unsigned>(queued), kThreads, 0, stream>>>(runs, to);
    CUDA_CHECK(cudaGetLastError());
    to += queued;
    queued = 0;
    runs.count = 0;
  };
  for (const Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    if (runs.count == kRuns) launch();
    runs.run[runs.count++] = run_from(t, queued);
    queued += divide_up(t.numel(), kPiece);
  }
  launch();
  add_pieces_kernel<<<1, kFinishThreads, 0, stream>>>(out.as<double>(), partial.as<double>(), pieces);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
