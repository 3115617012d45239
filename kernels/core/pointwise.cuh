// Launches of pointwise kernels over the rows and columns of matrices.
//
// A functor F<V> takes V neighbouring columns at a time, in two steps, so that the loads of several packets are in
// flight before the first store:  Loaded load(row, column);  void finish(row, column, Loaded).
#pragma once

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

constexpr int kPointwiseThreads = 256;

// A matrix of `rows` rows of `cols` columns; a matrix without gaps may be taken as one long row.
struct Extent {
  int64_t rows, cols;
};
template <class... Tensors>
Extent extent_of(const Tensor& first, const Tensors&... others) {
  if (first.contiguous() && (others.contiguous() && ...)) return {1, first.numel()};
  return {first.rows(), first.cols()};
}

// True when V columns at a time can be accessed with accesses of up to 16 bytes in every tensor seen as `e`.
template <class... Tensors>
bool wide_extent(int V, const Extent& e, const Tensors&... tensors) {
  const auto fits = [&](const Tensor& t) {
    const int64_t bytes = V * size_of(t.dtype), step = bytes < 16 ? bytes : 16;
    return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(step) == 0 && (e.rows <= 1 || t.ld % V == 0);
  };
  return e.cols % V == 0 && (fits(tensors) && ...);
}

template <int V, int unroll, class F>
__global__ void __launch_bounds__(kPointwiseThreads) pointwise_kernel(Extent extent, F f) {
  using Loaded = decltype(f.load(int64_t{0}, int64_t{0}));
  const int64_t groups = extent.cols / V, total = extent.rows * groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kPointwiseThreads * unroll) + threadIdx.x;
  const bool small = total <= INT32_MAX;  // 32-bit divisions are several times cheaper
  int64_t row[unroll], column[unroll];
  Loaded loaded[unroll];
#pragma unroll
  for (int i = 0; i < unroll; ++i) {
    const int64_t at = first + i * kPointwiseThreads;
    if (at >= total) break;
    row[i] = extent.rows == 1 ? 0 : small ? static_cast<unsigned>(at) / static_cast<unsigned>(groups) : at / groups;
    column[i] = (at - row[i] * groups) * V;
    loaded[i] = f.load(row[i], column[i]);
  }
#pragma unroll
  for (int i = 0; i < unroll; ++i) {
    if (first + i * kPointwiseThreads >= total) break;
    f.finish(row[i], column[i], loaded[i]);
  }
}

template <int V, int unroll, class F>
void pointwise(cudaStream_t stream, const Extent& extent, const F& f) {
  const int64_t total = extent.rows * (extent.cols / V);
  if (total == 0) return;
  const unsigned blocks = static_cast<unsigned>(divide_up(total, kPointwiseThreads * unroll));
  pointwise_kernel<V, unroll, F><<<blocks, kPointwiseThreads, 0, stream>>>(extent, f);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
