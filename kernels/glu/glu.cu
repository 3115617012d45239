// Forward: a, b read, y written once, 3 N F elements; SiTU takes about 45 instructions an element, which is what memory
// leaves time for.  Backward: 5 N F elements, about 65.  A warp takes a row in backward, since drow_scale is a sum over
// the row.
#include "kernels/core/pointwise.cuh"
#include "kernels/glu/glu_cuda.h"
#include "kernels/glu/units.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kPacket = 8;
constexpr int kBackwardThreads = 256;

template <class T>
struct Rows {
  T* data;
  int64_t ld;
  explicit Rows(const Tensor& t) : data(data_of<T>(t)), ld(t.ld) {}
  __device__ __forceinline__ T* at(int64_t r, int64_t c) const { return data + r * ld + c; }
};

template <class Unit, class T, int V>
struct Forward {
  Unit unit;
  Rows<T> y, a, b;
  const float* row_scale;
  struct Loaded {
    Packed<T, V> a, b;
    float p;
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded l;
    l.a.template load<Cache::once>(a.at(r, c));
    l.b.template load<Cache::once>(b.at(r, c));
    l.p = row_scale ? row_scale[r] : 1.f;
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& l) const {
    float u[V], v[V];
    l.a.unpack(u);
    l.b.unpack(v);
#pragma unroll
    for (int i = 0; i < V; ++i) u[i] = l.p * unit.value(u[i], v[i]);
    store(y.at(r, c), u);
  }
};

template <class Unit, class T, int V>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(Unit unit, Extent extent, Rows<T> da, Rows<T> db, float* drow_scale, Rows<T> dy, Rows<T> a,
                    Rows<T> b, const float* row_scale) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kBackwardThreads / kWarp) + threadIdx.x / kWarp;
  if (r >= extent.rows) return;  // whole warps
  const float p = row_scale ? row_scale[r] : 1.f;
  float dp = 0.f;
  for (int64_t c = lane * V; c < extent.cols; c += kWarp * V) {
    float u[V], v[V], d[V];
    load<V, Cache::once>(u, a.at(r, c));
    load<V, Cache::once>(v, b.at(r, c));
    load<V, Cache::once>(d, dy.at(r, c));
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const ValueSlope left = unit.left(u[i]), right = unit.right(v[i]);
      const float pd = p * d[i];
      dp += d[i] * (left.value * right.value);
      u[i] = pd * right.value * left.slope;
      v[i] = pd * left.value * right.slope;
    }
    store(da.at(r, c), u);
    store(db.at(r, c), v);
  }
  if (!drow_scale) return;
  dp = warp_sum(dp);
  if (lane == 0) drow_scale[r] = dp;
}

template <class T, int V>
struct GateForward {
  Rows<T> y, o, gate;
  struct Loaded {
    Packed<T, V> o, gate;
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded l;
    l.o.template load<Cache::once>(o.at(r, c));
    l.gate.template load<Cache::once>(gate.at(r, c));
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& l) const {
    float x[V], g[V];
    l.o.unpack(x);
    l.gate.unpack(g);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] *= sigmoid(g[i]);
    store(y.at(r, c), x);
  }
};

template <class T, int V>
struct GateBackward {
  Rows<T> d_o, dgate, dy, o, gate;
  struct Loaded {
    Packed<T, V> dy, o, gate;
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded l;
    l.dy.template load<Cache::once>(dy.at(r, c));
    l.o.template load<Cache::once>(o.at(r, c));
    l.gate.template load<Cache::once>(gate.at(r, c));
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& l) const {
    float d[V], x[V], g[V];
    l.dy.unpack(d);
    l.o.unpack(x);
    l.gate.unpack(g);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const ValueSlope s = sigmoid_slope(g[i]);
      g[i] = d[i] * x[i] * s.slope;
      d[i] *= s.value;
    }
    store(d_o.at(r, c), d);
    store(dgate.at(r, c), g);
  }
};

float* data_or_null(const Tensor& t) {
  return t ? t.f32() : nullptr;
}

// f(Unit, Type<T>) for the unit and the activation dtype.
template <class F>
void with_unit(const Glu& glu, DType dtype, F&& f) {
  with_activation(dtype, [&](auto type) {
    if (glu.kind == Glu::Kind::situ) return f(SituUnit(glu), type);
    f(SiluUnit(glu), type);
  });
}

}  // namespace

void glu_forward(Stream& s, const Glu& glu, Tensor y, Tensor a, Tensor b, Tensor row_scale) {
  const cudaStream_t stream = cuda_stream(s);
  const Extent e = row_scale ? Extent{a.rows(), a.cols()} : extent_of(y, a, b);
  const float* p = data_or_null(row_scale);
  with_unit(glu, a.dtype, [&](auto unit, auto type) {
    using Unit = decltype(unit);
    using T = typename decltype(type)::type;
    const Rows<T> out(y), left(a), right(b);
    if (wide_extent(kPacket, e, y, a, b)) {
      pointwise<kPacket, 2>(stream, e, Forward<Unit, T, kPacket>{unit, out, left, right, p});
    } else {
      pointwise<1, 2>(stream, e, Forward<Unit, T, 1>{unit, out, left, right, p});
    }
  });
}

void glu_backward(Stream& s, const Glu& glu, Tensor da, Tensor db, Tensor drow_scale, Tensor dy, Tensor a, Tensor b,
                  Tensor row_scale) {
  if (a.rows() == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  const Extent e{a.rows(), a.cols()};
  const unsigned blocks = static_cast<unsigned>(divide_up(e.rows, kBackwardThreads / kWarp));
  const float* p = data_or_null(row_scale);
  float* dp = data_or_null(drow_scale);
  with_unit(glu, a.dtype, [&](auto unit, auto type) {
    using Unit = decltype(unit);
    using T = typename decltype(type)::type;
    const Rows<T> d_left(da), d_right(db), d_out(dy), left(a), right(b);
    if (wide_extent(kPacket, e, da, db, dy, a, b)) {
      backward_kernel<Unit, T, kPacket>
          <<<blocks, kBackwardThreads, 0, stream>>>(unit, e, d_left, d_right, dp, d_out, left, right, p);
    } else {
      backward_kernel<Unit, T, 1>
          <<<blocks, kBackwardThreads, 0, stream>>>(unit, e, d_left, d_right, dp, d_out, left, right, p);
    }
    CUDA_CHECK(cudaGetLastError());
  });
}

void sigmoid_gate_forward(Stream& s, Tensor y, Tensor o, Tensor gate) {
  const cudaStream_t stream = cuda_stream(s);
  const Extent e = extent_of(y, o, gate);
  with_activation(o.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Rows<T> out(y), in(o), g(gate);
    if (wide_extent(kPacket, e, y, o, gate)) {
      pointwise<kPacket, 2>(stream, e, GateForward<T, kPacket>{out, in, g});
    } else {
      pointwise<1, 2>(stream, e, GateForward<T, 1>{out, in, g});
    }
  });
}

void sigmoid_gate_backward(Stream& s, Tensor d_o, Tensor dgate, Tensor dy, Tensor o, Tensor gate) {
  const cudaStream_t stream = cuda_stream(s);
  const Extent e = extent_of(d_o, dgate, dy, o, gate);
  with_activation(o.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Rows<T> d_in(d_o), d_g(dgate), d_out(dy), in(o), g(gate);
    if (wide_extent(kPacket, e, d_o, dgate, dy, o, gate)) {
      pointwise<kPacket, 2>(stream, e, GateBackward<T, kPacket>{d_in, d_g, d_out, in, g});
    } else {
      pointwise<1, 2>(stream, e, GateBackward<T, 1>{d_in, d_g, d_out, in, g});
    }
  });
}

}  // namespace kestrel::cuda
