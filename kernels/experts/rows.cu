// Rows to the experts and back.
//
//   gather_rows   rows[r,:] = x[token_of[r],:], r < offsets[E]                       a warp per row
//   sum_rows      y[n,:] = sum_j rows[row_of[n,j],:], fp32, slot 0 first             a warp per token
// The number of rows is on the device: warps beyond it leave.  Every element is written by one thread.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

template <class T, int V>
__global__ void gather_kernel(T* rows, int64_t rows_ld, const T* x, int64_t x_ld, const int32_t* token_of,
                              const int64_t* used, int64_t D) {
  const int64_t r = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
  if (r >= *used) return;
  const T* from = x + int64_t{token_of[r]} * x_ld;
  T* to = rows + r * rows_ld;
#pragma unroll 4
  for (int64_t d = threadIdx.x * V; d < D; d += kWarp * V) {
    Packed<T, V> packed;
    packed.load(from + d);
    packed.template store<Cache::once>(to + d);
  }
}

// Slots whose rows are in flight at a time.
constexpr int kTogether = 4;

template <class T, int V>
__global__ void sum_kernel(T* y, int64_t y_ld, const T* rows, int64_t rows_ld, const int32_t* row_of, int64_t row_ld,
                           int64_t N, int slots, int64_t D) {
  const int64_t n = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.y;
  if (n >= N) return;
  const int32_t* mine = row_of + n * row_ld;
  for (int64_t d = threadIdx.x * V; d < D; d += kWarp * V) {
    float sum[V] = {};
    for (int j = 0; j < slots; j += kTogether) {
      Packed<T, V> packed[kTogether];
      bool used[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int32_t row = j + i < slots ? mine[j + i] : -1;
        used[i] = row >= 0;
        if (used[i]) packed[i].template load<Cache::once>(rows + int64_t{row} * rows_ld + d);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (!used[i]) continue;
        float x[V];
        packed[i].unpack(x);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += x[v];
      }
    }
    store<V>(y + n * y_ld + d, sum);
  }
}

template <class F>
void with_width(const Tensor& a, const Tensor& b, F&& f) {
  with_activation(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = kPerAccess<T>;
    if (all_wide(V, a, b)) return f(type, std::integral_constant<int, V>{});
    f(type, std::integral_constant<int, 1>{});
  });
}

}  // namespace

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan) {
  const int64_t most = rows.rows() < plan.max_rows() ? rows.rows() : plan.max_rows();
  if (most == 0 || rows.cols() == 0) return;
  with_width(rows, x, [&](auto type, auto v) {
    using T = typename decltype(type)::type;
    gather_kernel<T, v.value>
        <<<static_cast<unsigned>(divide_up(most, kWarpsPerBlock)), dim3(kWarp, kWarpsPerBlock), 0, cuda_stream(s)>>>(
            data_of<T>(rows), rows.ld, data_of<T>(x), x.ld, plan.token_of.i32(),
            plan.offsets.as<int64_t>() + plan.experts(), rows.cols());
  });
  CUDA_CHECK(cudaGetLastError());
}

void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan) {
  const int64_t N = plan.tokens();
  if (N == 0 || y.cols() == 0) return;
  with_width(y, rows, [&](auto type, auto v) {
    using T = typename decltype(type)::type;
    sum_kernel<T, v.value>
        <<<static_cast<unsigned>(divide_up(N, kWarpsPerBlock)), dim3(kWarp, kWarpsPerBlock), 0, cuda_stream(s)>>>(
            data_of<T>(y), y.ld, data_of<T>(rows), rows.ld, plan.row_of.i32(), plan.row_of.ld, N,
            static_cast<int>(plan.slots()), y.cols());
  });
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
