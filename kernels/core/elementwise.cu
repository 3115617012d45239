// Copies, casts and sums: one pass, every byte read or written once, bound by memory (no arithmetic to speak of).
#include "kernels/core/device_cuda.h"
#include "kernels/core/elementwise_cuda.h"
#include "kernels/core/pointwise.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;

template <class Out, class In, int V>
struct Cast {
  Out* out;
  const In* in;
  int64_t out_ld, in_ld;
  using Loaded = Packed<In, V>;
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded x;
    x.template load<Cache::once>(in + r * in_ld + c);
    return x;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& packed) const {
    float x[V];
    packed.unpack(x);
    store(out + r * out_ld + c, x);
  }
};

template <class T, int V>
struct AddFloats {
  T* out;
  const T* in;
  int64_t out_ld, in_ld;
  float scale;
  struct Loaded {
    float x[V], y[V];
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded l;
    cuda::load<V, Cache::once>(l.x, in + r * in_ld + c);
    cuda::load<V>(l.y, out + r * out_ld + c);
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, Loaded l) const {
#pragma unroll
    for (int i = 0; i < V; ++i) l.y[i] += scale * l.x[i];
    store(out + r * out_ld + c, l.y);
  }
};

struct AddInts {
  int32_t* out;
  const int32_t* in;
  int64_t out_ld, in_ld;
  __device__ int32_t load(int64_t r, int64_t c) const { return in[r * in_ld + c]; }
  __device__ void finish(int64_t r, int64_t c, int32_t x) const { out[r * out_ld + c] += x; }
};

template <class T, int V>
void add_floats(cudaStream_t stream, const Extent& e, const Tensor& out, const Tensor& in, float scale) {
  T* o = static_cast<T*>(out.data);
  const T* i = static_cast<const T*>(in.data);
  if (wide_extent(V, e, out, in)) {
    pointwise<V, kUnroll>(stream, e, AddFloats<T, V>{o, i, out.ld, in.ld, scale});
  } else {
    pointwise<1, kUnroll>(stream, e, AddFloats<T, 1>{o, i, out.ld, in.ld, scale});
  }
}

template <class Out, class In>
void cast(cudaStream_t stream, const Tensor& out, const Tensor& in) {
  constexpr int V = 8;
  const Extent e = extent_of(out, in);
  Out* to = data_of<Out>(out);
  const In* from = data_of<In>(in);
  if (wide_extent(V, e, out, in)) {
    pointwise<V, kUnroll>(stream, e, Cast<Out, In, V>{to, from, out.ld, in.ld});
  } else {
    pointwise<1, kUnroll>(stream, e, Cast<Out, In, 1>{to, from, out.ld, in.ld});
  }
}

// start[t] = the last boundary at or before t: a running maximum over the row, kThreads tokens at a time.
__global__ void __launch_bounds__(kThreads)
    document_starts_kernel(int32_t* start, int64_t start_ld, const int32_t* segment, int64_t segment_ld, int64_t T) {
  __shared__ int highest[kThreads / kWarp];
  const int32_t* id = segment + blockIdx.x * segment_ld;
  int32_t* out = start + blockIdx.x * start_ld;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
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
  const cudaStream_t stream = cuda_stream(s);
  const Extent e = extent_of(out, in);
  if (in.dtype == DType::i32) {
    pointwise<1, kUnroll>(stream, e, AddInts{out.i32(), in.i32(), out.ld, in.ld});
  } else if (in.dtype == DType::bf16) {
    add_floats<bf16_t, 8>(stream, e, out, in, scale);
  } else {
    add_floats<float, 4>(stream, e, out, in, scale);
  }
}

void document_starts(Stream& s, Tensor document_start, Tensor segment) {
  if (segment.numel() == 0) return;
  document_starts_kernel<<<static_cast<unsigned>(segment.rows()), kThreads, 0, cuda_stream(s)>>>(
      document_start.i32(), document_start.ld, segment.i32(), segment.ld, segment.cols());
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
