// Forward: x read and y written once, 2 N C elements; backward: x, dy read and dx written once, 3 N C elements.  About
// 16 and 30 operations an element, below what memory leaves time for, so both are bound by memory.
//
// A thread takes V channels and walks along a strip of time with the last W-1 inputs in registers.  Strips overlap by
// W-1 rows, which the neighbour finds in L2.  Backward walks forward in time too: token t adds to the gradients of
// t .. t-(W-1), of which the oldest is then complete; the W-1 tokens after the strip are computed by both neighbours.
// dw: one partial [W, C] per strip (F32, scratch), added in strip order by a second kernel.
#include "kernels/core/column_sum.cuh"
#include "kernels/short_conv/short_conv_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroup = 4;  // tokens whose loads are in flight together
constexpr int64_t kForwardStrip = 32, kBackwardStrip = 128;

template <class T>
struct Rows {
  T* data;
  int64_t ld;
};

template <class T>
struct Input {
  int64_t B, T_, C;
  Rows<const T> x;
  const float* weight;  // [C, width]
  int width;
  const int32_t* start;  // [B, T] or null
  int64_t start_ld;
  Rows<const T> history;  // [B (width-1), C] or null
};

// One thread's strip: rows [first, last) of batch row b.
struct Strip {
  int64_t b, first, last;
};
__device__ __forceinline__ Strip strip_of(int64_t index, int64_t T, int64_t length) {
  const int64_t per_row = (T + length - 1) / length, b = index / per_row, first = (index - b * per_row) * length;
  return {b, first, first + length < T ? first + length : T};
}

// The taps a thread needs, and its window on the past: x[t-1], x[t-2], .. of its V channels.
template <class T, int V, int W>
struct Walker {
  const Input<T>& in;
  int64_t b, c;
  float weight[W][V];    // by lag
  float past[W - 1][V];  // past[i] = x[t-1-i]

  __device__ Walker(const Input<T>& input, const Strip& strip, int64_t channel) : in(input), b(strip.b), c(channel) {
    const float* taps = in.weight + c * in.width;
    if (W == 4 && in.width == 4 && reinterpret_cast<uintptr_t>(in.weight) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float w[4];
        load<4, Cache::constant>(w, taps + 4 * i);
#pragma unroll
        for (int lag = 0; lag < 4; ++lag) weight[lag][i] = w[3 - lag];
      }
    } else {
#pragma unroll
      for (int lag = 0; lag < W; ++lag) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          weight[lag][i] = lag < in.width ? taps[i * in.width + (in.width - 1 - lag)] : 0.f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < W - 1; ++i) {
      const int64_t t = strip.first - 1 - i;
      const T* from = nullptr;
      if (t >= 0) {
        from = in.x.data + (b * in.T_ + t) * in.x.ld + c;
      } else if (in.history.data && t >= 1 - in.width) {
        from = in.history.data + ((b + 1) * (in.width - 1) + t) * in.history.ld + c;
      }
      if (from) {
        load(past[i], from);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) past[i][j] = 0.f;
      }
    }
  }
  // The number of earlier tokens that token t sees.
  __device__ __forceinline__ int reach(int64_t t) const {
    int64_t r = in.width - 1;
    if (!in.history.data && t < r) r = t;
    if (in.start) {
      const int64_t within = t - in.start[b * in.start_ld + t];
      r = within < r ? within : r;
    }
    return static_cast<int>(r);
  }
  __device__ __forceinline__ void convolve(float (&u)[V], const float (&x)[V], int reach) const {
#pragma unroll
    for (int j = 0; j < V; ++j) u[j] = weight[0][j] * x[j];
#pragma unroll
    for (int lag = 1; lag < W; ++lag) {
      if (lag > reach) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) u[j] += weight[lag][j] * past[lag - 1][j];
    }
  }
  __device__ __forceinline__ void push(const float (&x)[V]) {
#pragma unroll
    for (int i = W - 2; i > 0; --i) {
#pragma unroll
      for (int j = 0; j < V; ++j) past[i][j] = past[i - 1][j];
    }
#pragma unroll
    for (int j = 0; j < V; ++j) past[0][j] = x[j];
  }
};

template <class T, int V, int W>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Input<T> in, const Rows<T> y) {
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
  if (c >= in.C) return;
  const Strip strip = strip_of(blockIdx.x, in.T_, kForwardStrip);
  Walker<T, V, W> walker(in, strip, c);
  const T* x = in.x.data + strip.b * in.T_ * in.x.ld + c;
  T* out = y.data + strip.b * in.T_ * y.ld + c;
  const auto step = [&](int64_t t, const Packed<T, V>& packed, int reach) {
    float v[V], u[V];
    packed.unpack(v);
    walker.convolve(u, v, reach);
    walker.push(v);
#pragma unroll
    for (int j = 0; j < V; ++j) u[j] = silu(u[j]);
    store(out + t * y.ld, u);
  };
  const auto fetch = [&](int64_t t, Packed<T, V>(&packed)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) packed[i].load(x + (t + i) * in.x.ld);
  };
  // The next group is on its way while this one is worked on.
  int64_t t = strip.first;
  Packed<T, V> ahead[kGroup];
  if (t + kGroup <= strip.last) fetch(t, ahead);
  for (; t + kGroup <= strip.last; t += kGroup) {
    Packed<T, V> packed[kGroup];
    int reach[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) packed[i] = ahead[i];
    if (t + 2 * kGroup <= strip.last) fetch(t + kGroup, ahead);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) reach[i] = walker.reach(t + i);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) step(t + i, packed[i], reach[i]);
  }
  for (; t < strip.last; ++t) {
    Packed<T, V> packed;
    packed.load(x + t * in.x.ld);
    step(t, packed, walker.reach(t));
  }
}

template <class T, int V, int W>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Input<T> in, const Rows<T> dx, const Rows<const T> dy, float* partial) {
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
  if (c >= in.C) return;
  const Strip strip = strip_of(blockIdx.x, in.T_, kBackwardStrip);
  Walker<T, V, W> walker(in, strip, c);
  const T* x = in.x.data + strip.b * in.T_ * in.x.ld + c;
  const T* d_out = dy.data + strip.b * in.T_ * dy.ld + c;
  T* d_in = dx.data + strip.b * in.T_ * dx.ld + c;
  float dw[W][V] = {};           // by lag
  float pending[W - 1][V] = {};  // pending[i] = dx[t-1-i] so far
  const auto step = [&](int64_t t, const Packed<T, V>& packed_x, const Packed<T, V>& packed_dy, int reach) {
    float v[V], d[V], u[V];
    packed_x.unpack(v);
    packed_dy.unpack(d);
    walker.convolve(u, v, reach);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] *= silu_slope(u[j]).slope;  // du
    const bool own = t < strip.last;
    if (own) {
#pragma unroll
      for (int j = 0; j < V; ++j) dw[0][j] += d[j] * v[j];
    }
#pragma unroll
    for (int lag = 1; lag < W; ++lag) {
      if (lag > reach) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (own) dw[lag][j] += d[j] * walker.past[lag - 1][j];
        pending[lag - 1][j] += walker.weight[lag][j] * d[j];
      }
    }
    const int64_t done = t - (W - 1);
    if (done >= strip.first && done < strip.last) store(d_in + done * dx.ld, pending[W - 2]);
#pragma unroll
    for (int i = W - 2; i > 0; --i) {
#pragma unroll
      for (int j = 0; j < V; ++j) pending[i][j] = pending[i - 1][j];
    }
#pragma unroll
    for (int j = 0; j < V; ++j) pending[0][j] = walker.weight[0][j] * d[j];
    walker.push(v);
  };
  const int64_t end = strip.last + in.width - 1 < in.T_ ? strip.last + in.width - 1 : in.T_;
  int64_t t = strip.first;
  for (; t + kGroup <= end; t += kGroup) {
    Packed<T, V> xs[kGroup], ds[kGroup];
    int reach[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      xs[i].load(x + (t + i) * in.x.ld);
      ds[i].load(d_out + (t + i) * dy.ld);
      reach[i] = walker.reach(t + i);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) step(t + i, xs[i], ds[i], reach[i]);
  }
  for (; t < end; ++t) {
    Packed<T, V> xs, ds;
    xs.load(x + t * in.x.ld);
    ds.load(d_out + t * dy.ld);
    step(t, xs, ds, walker.reach(t));
  }
#pragma unroll
  for (int i = W - 2; i >= 0; --i) {
    const int64_t done = end - 1 - i;
    if (done >= strip.first && done < strip.last) store(d_in + done * dx.ld, pending[i]);
  }
#pragma unroll
  for (int lag = 0; lag < W; ++lag) {
    if (lag < in.width)
      store(partial + (blockIdx.x * static_cast<int64_t>(in.width) + (in.width - 1 - lag)) * in.C + c, dw[lag]);
  }
}

// dweight[c, i] += sum of partial[., i, c]
struct AddTaps {
  float* dweight;
  int64_t C;
  int width;
  __device__ void operator()(int64_t at, float sum) const {
    const int64_t i = at / C, c = at - i * C;
    dweight[c * width + i] += sum;
  }
};

template <class T>
Input<T> input_of(int64_t B, int64_t time, const Tensor& x, const Tensor& weight, const Tensor& start,
                  const Tensor& history) {
  return {B,
          time,
          x.cols(),
          {data_of<T>(x), x.ld},
          weight.f32(),
          static_cast<int>(weight.cols()),
          start ? start.i32() : nullptr,
          start.ld,
          {history ? data_of<T>(history) : nullptr, history.ld}};
}

// f(std::integral_constant<int, V>, std::integral_constant<int, W>): V as asked when the tensors are `aligned`, W the
// number of taps the kernel has room for.
template <int V, class F>
void with_sizes(bool aligned, int64_t width, F&& f) {
  using std::integral_constant;
  if (aligned && width <= 4) return f(integral_constant<int, V>{}, integral_constant<int, 4>{});
  if (width <= 4) return f(integral_constant<int, 1>{}, integral_constant<int, 4>{});
  f(integral_constant<int, 1>{}, integral_constant<int, 8>{});
}

dim3 grid(int64_t strips, int64_t C, int V) {
  return dim3(static_cast<unsigned>(strips), static_cast<unsigned>(divide_up(C, int64_t{kThreads} * V)));
}

}  // namespace

void short_conv_forward(Stream& s, int64_t B, int64_t T, Tensor y, Tensor x, Tensor weight, Tensor document_start,
                        Tensor history) {
  constexpr int kWide = 4;  // with 8 channels too few threads fit: 0.271 against 0.236 ms at B 8, T 4096, C 6144
  const int64_t C = x.cols(), strips = B * divide_up(T, kForwardStrip);
  if (strips == 0 || C == 0) return;
  const bool aligned = all_wide(kWide, y, x, history);
  with_activation(x.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    const Input<E> in = input_of<E>(B, T, x, weight, document_start, history);
    const Rows<E> out{data_of<E>(y), y.ld};
    with_sizes<kWide>(aligned, weight.cols(), [&](auto v, auto w) {
      forward_kernel<E, v(), w()><<<grid(strips, C, v()), kThreads, 0, cuda_stream(s)>>>(in, out);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}

void short_conv_backward(Stream& s, int64_t B, int64_t T, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight,
                         Tensor document_start) {
  constexpr int kWide = 4;  // 8 channels would take 200 registers
  const int64_t C = x.cols(), W = weight.cols(), strips = B * divide_up(T, kBackwardStrip);
  ScratchScope scope(s);
  const Tensor partial = s.temp({strips, W, C});
  if (s.planning() || strips == 0 || C == 0) return;
  const bool aligned = all_wide(kWide, dx, dy, x);
  with_activation(x.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    const Input<E> in = input_of<E>(B, T, x, weight, document_start, {});
    const Rows<E> d_in{data_of<E>(dx), dx.ld};
    const Rows<const E> d_out{data_of<E>(dy), dy.ld};
    with_sizes<kWide>(aligned, W, [&](auto v, auto w) {
      backward_kernel<E, v(), w()>
          <<<grid(strips, C, v()), kThreads, 0, cuda_stream(s)>>>(in, d_in, d_out, partial.f32());
    });
  });
  CUDA_CHECK(cudaGetLastError());
  column_sum(cuda_stream(s), partial.f32(), strips, W * C, W * C, AddTaps{dweight.f32(), C, static_cast<int>(W)});
}

}  // namespace kestrel::cuda
