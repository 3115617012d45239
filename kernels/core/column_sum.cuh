// Sums over pieces: the second half of every reduction over rows.
//
// A kernel that sums over rows leaves one partial sum per piece of rows in scratch; the pieces depend on the number of
// rows only.  This adds the pieces of each column: 32 runs of consecutive pieces, each in order, then the runs in
// order. So the bits depend on the shape alone.
#pragma once

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

constexpr int kColumnSumRuns = 32;

template <class Finish>
__global__ void __launch_bounds__(kWarp* kColumnSumRuns)
    column_sum_kernel(const float* partial, int64_t pieces, int64_t stride, int64_t cols, Finish finish) {
  __shared__ float runs[kColumnSumRuns][kWarp];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const int64_t length = (pieces + kColumnSumRuns - 1) / kColumnSumRuns;
  const int64_t first = threadIdx.y * length, last = first + length < pieces ? first + length : pieces;
  float sum = 0.f;
  if (c < cols) {
#pragma unroll 8
    for (int64_t p = first; p < last; ++p) sum += partial[p * stride + c];
  }
  runs[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kColumnSumRuns; ++i) total += runs[i][threadIdx.x];
  finish(c, total);
}

// finish(c, sum over p < pieces of partial[p * stride + c]) for every c < cols, on the device.
template <class Finish>
void column_sum(cudaStream_t stream, const float* partial, int64_t pieces, int64_t stride, int64_t cols,
                Finish finish) {
  if (cols == 0) return;
  column_sum_kernel<Finish><<<static_cast<unsigned>(divide_up(cols, kWarp)), dim3(kWarp, kColumnSumRuns), 0, stream>>>(
      partial, pieces, stride, cols, finish);
  CUDA_CHECK(cudaGetLastError());
}

struct AddTo {
  float* out;
  __device__ void operator()(int64_t c, float sum) const { out[c] += sum; }
};

// Pieces of rows for such a reduction: enough for twelve blocks on each of 132 multiprocessors, in multiples of
// `least` rows.  A function of the number of rows only.
struct Pieces {
  int64_t count, rows;  // rows per piece; the last may have fewer
};
inline Pieces pieces_of(int64_t rows, int64_t least) {
  constexpr int64_t kMost = 1584;
  const int64_t per = divide_up(rows > 0 ? rows : 1, kMost);
  const int64_t size = per > least ? divide_up(per, least) * least : least;
  return {divide_up(rows, size), size};
}

}  // namespace kestrel::cuda
