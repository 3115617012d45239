// Rows to the experts and back.
//
//   gather_rows   rows[row_of[n,j],:] = x[n,:]                                x is read once, not once per slot
//   sum_rows      y[n,:] = sum_j rows[row_of[n,j],:], fp32, slot 0 first
//
// A warp takes a chunk of a token's columns, which is all of them up to 2 KB.  Only rows that some slot names are
// touched, so neither needs to know how many there are; every element is written by one thread.  Both move N + used
// rows: bound by memory.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kThreads = kWarpsPerBlock * kWarp;
constexpr int kPackets = 4;  // of a lane in a chunk
template <int V>
constexpr int kStep = kWarp* V;  // columns from one packet of a lane to its next
template <int V>
constexpr int kChunk = kPackets* kStep<V>;

// Token and first column of this thread; one of a warp's threads is beyond the last token only if all are.
struct Task {
  int64_t n, d;
};
template <int V>
__device__ __forceinline__ Task task_of(int64_t chunks) {
  const int64_t warp = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t n = warp / chunks;
  return {n, (warp - n * chunks) * kChunk<V> + threadIdx.x % kWarp * V};
}

// The slots of each token.  A row outside [0, room) has no place in the buffer of rows: -1 among them.
struct Slots {
  const int32_t* row_of;
  int64_t ld, N;
  int slots;
  uint32_t room;
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(T* rows, int64_t rows_ld, const T* x, int64_t x_ld, Slots plan, int64_t D, int64_t chunks) {
  const Task at = task_of<V>(chunks);
  if (at.n >= plan.N) return;
  Packed<T, V> packed[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int64_t d = at.d + i * kStep<V>;
    if (d < D) packed[i].load(x + at.n * x_ld + d);
  }
  const int lane = threadIdx.x % kWarp;
  for (int first = 0; first < plan.slots; first += kWarp) {
    const int here = plan.slots - first < kWarp ? plan.slots - first : kWarp;
    const int32_t mine = lane < here ? plan.row_of[at.n * plan.ld + first + lane] : -1;
    for (int j = 0; j < here; ++j) {
      const uint32_t row = static_cast<uint32_t>(__shfl_sync(0xffffffffu, mine, j));
      if (row >= plan.room) continue;
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const int64_t d = at.d + i * kStep<V>;
        if (d < D) packed[i].template store<Cache::once>(rows + row * rows_ld + d);
      }
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(T* y, int64_t y_ld, const T* rows, int64_t rows_ld, Slots plan, int64_t D, int64_t chunks) {
  constexpr int kTogether = 8;  // slots whose rows are in flight
  static_assert(kWarp % kTogether == 0);
  const Task at = task_of<V>(chunks);
  if (at.n >= plan.N) return;
  const int lane = threadIdx.x % kWarp;
  for (int i = 0; i < kPackets; ++i) {
    const int64_t d = at.d + i * kStep<V>;
    if (d - lane * V >= D) return;  // the whole warp
    float sum[V] = {};
    for (int first = 0; first < plan.slots; first += kWarp) {
      const int here = plan.slots - first < kWarp ? plan.slots - first : kWarp;
      const int32_t mine = lane < here ? plan.row_of[at.n * plan.ld + first + lane] : -1;
      for (int j = 0; j < here; j += kTogether) {
        Packed<T, V> packed[kTogether];
        uint32_t row[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) row[k] = static_cast<uint32_t>(__shfl_sync(0xffffffffu, mine, j + k));
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (row[k] < plan.room && d < D) packed[k].template load<Cache::once>(rows + row[k] * rows_ld + d);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (row[k] >= plan.room) continue;
          float x[V];
          packed[k].unpack(x);
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += x[v];
        }
      }
    }
    if (d < D) store<V, Cache::once>(y + at.n * y_ld + d, sum);
  }
}

// launch(type, width, slots, chunks, blocks) for rows of a token's width `tokens` to or from `rows`.
template <class Launch>
void for_tokens(const Tensor& tokens, const Tensor& rows, const DispatchPlan& plan, Launch&& launch) {
  const int64_t N = plan.tokens(), D = tokens.cols();
  if (N == 0 || D == 0) return;
  const int64_t room = rows.rows() < plan.max_rows() ? rows.rows() : plan.max_rows();
  const Slots slots{plan.row_of.i32(), plan.row_of.ld, N, static_cast<int>(plan.slots()), static_cast<uint32_t>(room)};
  with_activation(tokens.dtype, [&](auto type) {
    constexpr int kWide = kPerAccess<typename decltype(type)::type>;
    const auto run = [&](auto width) {
      const int64_t chunks = divide_up(D, kChunk<decltype(width)::value>);
      launch(type, width, slots, chunks, static_cast<unsigned>(divide_up(N * chunks, kWarpsPerBlock)));
    };
    if (all_wide(kWide, tokens, rows)) return run(std::integral_constant<int, kWide>{});
    run(std::integral_constant<int, 1>{});
  });
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan) {
  for_tokens(x, rows, plan, [&](auto type, auto width, const Slots& slots, int64_t chunks, unsigned blocks) {
    using T = typename decltype(type)::type;
    gather_kernel<T, decltype(width)::value><<<blocks, kThreads, 0, cuda_stream(s)>>>(
        data_of<T>(rows), rows.ld, data_of<T>(x), x.ld, slots, x.cols(), chunks);
  });
}

void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan) {
  for_tokens(y, rows, plan, [&](auto type, auto width, const Slots& slots, int64_t chunks, unsigned blocks) {
    using T = typename decltype(type)::type;
    sum_kernel<T, decltype(width)::value><<<blocks, kThreads, 0, cuda_stream(s)>>>(
        data_of<T>(y), y.ld, data_of<T>(rows), rows.ld, slots, y.cols(), chunks);
  });
}

}  // namespace kestrel::cuda
