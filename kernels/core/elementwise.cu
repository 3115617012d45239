// Copies, casts and sums: one pass, every byte read or written once, bound by memory (no arithmetic to speak of).
#include "kernels/core/cuda.cuh"
#include "kernels/core/device_cuda.h"
#include "kernels/core/elementwise_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // accesses in flight per thread

// A matrix as seen by a pointwise kernel: element i of the flattened matrix, V at a time.  Matrices without gaps are
// one long row, so that no division is needed.
struct Shape {
  int64_t rows, cols;
};
Shape flattened(const Tensor& a, const Tensor& b) {
  if (a.contiguous() && b.contiguous()) return {1, a.numel()};
  return {a.rows(), a.cols()};
}

// f(row, column) for every V-wide group of columns, kUnroll independent groups per thread.
template <int V, class F>
__global__ void __launch_bounds__(kThreads) pointwise(Shape shape, F f) {
  const int64_t groups = shape.cols / V, total = shape.rows * groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kThreads;
    if (at >= total) return;
    const int64_t row = shape.rows == 1 ? 0 : at / groups;
    f(row, (at - row * groups) * V);
  }
}

template <int V, class F>
void launch(cudaStream_t stream, Shape shape, F f) {
  const int64_t total = shape.rows * (shape.cols / V);
  if (total == 0) return;
  pointwise<V, F><<<static_cast<unsigned>(divide_up(total, kThreads * kUnroll)), kThreads, 0, stream>>>(shape, f);
  CUDA_CHECK(cudaGetLastError());
}

// Wide when the tensors and the (possibly flattened) width allow it.
template <int V, class Wide, class Narrow>
void launch_wide_or_not(cudaStream_t stream, Shape shape, bool aligned, const Wide& wide_form,
                        const Narrow& narrow_form) {
  if (aligned && shape.cols % V == 0) {
    launch<V>(stream, shape, wide_form);
  } else {
    launch<1>(stream, shape, narrow_form);
  }
}

template <class Out, class In, int V>
struct Cast {
  Out* out;
  const In* in;
  int64_t out_ld, in_ld;
  __device__ void operator()(int64_t r, int64_t c) const {
    float x[V];
    load<V, Cache::once>(x, in + r * in_ld + c);
    store<V>(out + r * out_ld + c, x);
  }
};

template <int V>
struct AddFloats {
  float* out;
  const float* in;
  int64_t out_ld, in_ld;
  float scale;
  __device__ void operator()(int64_t r, int64_t c) const {
    float x[V], y[V];
    load<V, Cache::once>(x, in + r * in_ld + c);
    load<V>(y, out + r * out_ld + c);
#pragma unroll
    for (int i = 0; i < V; ++i) y[i] += scale * x[i];
    store<V>(out + r * out_ld + c, y);
  }
};

struct AddInts {
  int32_t* out;
  const int32_t* in;
  int64_t out_ld, in_ld;
  __device__ void operator()(int64_t r, int64_t c) const { out[r * out_ld + c] += in[r * in_ld + c]; }
};

bool aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Rows of out and in start at multiples of 16 bytes.
bool aligned_rows(const Tensor& out, const Tensor& in, int V, bool one_row) {
  return aligned16(out.data) && aligned16(in.data) && (one_row || (out.ld % V == 0 && in.ld % V == 0));
}

template <class Out, class In>
void cast(cudaStream_t stream, const Tensor& out, const Tensor& in) {
  constexpr int V = 8;
  const Shape shape = flattened(out, in);
  Out* to = data_of<Out>(out);
  const In* from = data_of<In>(in);
  launch_wide_or_not<V>(stream, shape, aligned_rows(out, in, V, shape.rows == 1),
                        Cast<Out, In, V>{to, from, out.ld, in.ld}, Cast<Out, In, 1>{to, from, out.ld, in.ld});
}

// start[t] = the last boundary at or before t: a running maximum over the row, kThreads tokens at a time.
__global__ void __launch_bounds__(kThreads)
    document_starts_kernel(int32_t* start, int64_t start_ld, const int32_t* segment, int64_t segment_ld, int64_t T) {
  __shared__ int highest[kThreads / kWarp];
  const int32_t* id = segment + blockIdx.x * segment_ld;
  int32_t* out = start + blockIdx.x * start_ld;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int before = 0;
  for (int64_t t0 = 0; t0 < T; t0 += kThreads) {
    const int64_t t = t0 + threadIdx.x;
    int x = t < T && t > 0 && id[t] != id[t - 1] ? static_cast<int>(t) : 0;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int y = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x = max(x, y);
    }
    if (lane == kWarp - 1) highest[warp] = x;
    __syncthreads();
    int all = before;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) x = max(x, highest[w]);
      all = max(all, highest[w]);
    }
    if (t < T) out[t] = max(x, before);
    before = all;
    __syncthreads();
  }
}

}  // namespace

void fill_zero(Stream& s, Tensor t) {
  const int64_t row = t.cols() * size_of(t.dtype), rows = t.rows();
  if (row == 0 || rows == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  if (t.contiguous()) {
    CUDA_CHECK(cudaMemsetAsync(t.data, 0, static_cast<size_t>(row * rows), stream));
  } else {
    CUDA_CHECK(cudaMemset2DAsync(t.data, static_cast<size_t>(t.ld * size_of(t.dtype)), 0, static_cast<size_t>(row),
                                 static_cast<size_t>(rows), stream));
  }
}

void copy_cast(Stream& s, Tensor out, Tensor in) {
  const cudaStream_t stream = cuda_stream(s);
  if (out.dtype == in.dtype) {
    const int64_t size = size_of(in.dtype);
    if (out.dtype == DType::bf16) return cast<bf16_t, bf16_t>(stream, out, in);
    if (out.dtype == DType::f32) return cast<float, float>(stream, out, in);
    return copy_rows(s.queue, out.data, out.ld * size, in.data, in.ld * size, in.cols() * size, in.rows());
  }
  if (out.dtype == DType::bf16 && in.dtype == DType::f32) return cast<bf16_t, float>(stream, out, in);
  KESTREL_CHECK(out.dtype == DType::f32 && in.dtype == DType::bf16, "no cast from ", in.describe(), " to ",
                out.describe());
  cast<float, bf16_t>(stream, out, in);
}

void add_into(Stream& s, Tensor out, Tensor in, float scale) {
  constexpr int V = 4;
  const cudaStream_t stream = cuda_stream(s);
  const Shape shape = flattened(out, in);
  if (in.dtype == DType::i32) return launch<1>(stream, shape, AddInts{out.i32(), in.i32(), out.ld, in.ld});
  launch_wide_or_not<V>(stream, shape, aligned_rows(out, in, V, shape.rows == 1),
                        AddFloats<V>{out.f32(), in.f32(), out.ld, in.ld, scale},
                        AddFloats<1>{out.f32(), in.f32(), out.ld, in.ld, scale});
}

void document_starts(Stream& s, Tensor document_start, Tensor segment) {
  if (segment.numel() == 0) return;
  document_starts_kernel<<<static_cast<unsigned>(segment.rows()), kThreads, 0, cuda_stream(s)>>>(
      document_start.i32(), document_start.ld, segment.i32(), segment.ld, segment.cols());
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
