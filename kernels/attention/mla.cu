// Keys and values of MLA from the up-projected latents, and back: copies, each element read and written once (k_shared
// once per head, from L2).  Bound by memory.
#include "kernels/attention/attention_cuda.h"
#include "kernels/core/pointwise.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kPacket = 8;

// Element (n, c) of a matrix.
template <class E>
struct Rows {
  E* data;
  int64_t ld;
  explicit Rows(const Tensor& t) : data(data_of<E>(t)), ld(t.ld) {}
  __device__ E* at(int64_t n, int64_t c) const { return data + n * ld + c; }
};

// k, v from kv, k_shared; a column is one of the H (nope + rope + v) of k and v together.
template <class E, int V>
struct Assemble {
  Rows<E> k, v, kv, shared;
  int nope, rope, value;
  struct Loaded {
    Packed<E, V> x;
  };
  __device__ void locate(int64_t column, int64_t& h, int& c) const {
    const int width = nope + rope + value;
    h = static_cast<int>(column) / width;
    c = static_cast<int>(column) % width;
  }
  __device__ Loaded load(int64_t n, int64_t column) const {
    int64_t h;
    int c;
    locate(column, h, c);
    Loaded l;
    if (c >= nope && c < nope + rope) {
      l.x.template load<Cache::keep>(shared.at(n, c - nope));
    } else {
      l.x.template load<Cache::once>(kv.at(n, h * (nope + value) + (c < nope ? c : c - rope)));
    }
    return l;
  }
  __device__ void finish(int64_t n, int64_t column, const Loaded& l) const {
    int64_t h;
    int c;
    locate(column, h, c);
    l.x.store(c < nope + rope ? k.at(n, h * (nope + rope) + c) : v.at(n, h * value + c - nope - rope));
  }
};

// dkv from dk, dv; a column is one of dkv.
template <class E, int V>
struct Split {
  Rows<E> dkv, dk, dv;
  int nope, rope, value;
  struct Loaded {
    Packed<E, V> x;
  };
  __device__ Loaded load(int64_t n, int64_t column) const {
    const int width = nope + value, h = static_cast<int>(column) / width, c = static_cast<int>(column) % width;
    Loaded l;
    l.x.template load<Cache::once>(c < nope ? dk.at(n, static_cast<int64_t>(h) * (nope + rope) + c)
                                            : dv.at(n, static_cast<int64_t>(h) * value + c - nope));
    return l;
  }
  __device__ void finish(int64_t n, int64_t column, const Loaded& l) const { l.x.store(dkv.at(n, column)); }
};

// dk_shared: the sum over heads, in their order.
template <class E, int V>
struct SumHeads {
  Rows<E> dshared, dk;
  int nope, rope, heads;
  struct Loaded {
    float x[V];
  };
  __device__ Loaded load(int64_t n, int64_t column) const {
    Loaded l{};
#pragma unroll 4
    for (int h = 0; h < heads; ++h) {
      float x[V];
      cuda::load<V, Cache::once>(x, dk.at(n, static_cast<int64_t>(h) * (nope + rope) + nope + column));
#pragma unroll
      for (int i = 0; i < V; ++i) l.x[i] += x[i];
    }
    return l;
  }
  __device__ void finish(int64_t n, int64_t column, const Loaded& l) const {
    store(dshared.at(n, column), l.x);
  }
};

// f(Type<E>, packet) by dtype and by whether 8 elements at a time fit everywhere.
template <int V>
struct Packet {
  static constexpr int size = V;
};
template <class F, class... Tensors>
void with_packet(const MlaDims& d, F&& f, const Tensor& first, const Tensors&... others) {
  const bool fits =
      d.nope % kPacket == 0 && d.rope % kPacket == 0 && d.v % kPacket == 0 && all_wide(kPacket, first, others...);
  KESTREL_CHECK(d.H * (d.nope + d.rope + d.v) <= INT32_MAX, "MLA rows of ", d.H, " heads of ", d.nope + d.rope + d.v);
  with_activation(first.dtype, [&](auto type) {
    if (fits) return f(type, Packet<kPacket>{});
    f(type, Packet<1>{});
  });
}

}  // namespace

void mla_assemble_forward(Stream& s, const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared) {
  const int nope = static_cast<int>(d.nope), rope = static_cast<int>(d.rope), value = static_cast<int>(d.v);
  const Extent e{d.N, d.H * (d.nope + d.rope + d.v)};
  with_packet(
      d,
      [&](auto type, auto packet) {
        using E = typename decltype(type)::type;
        constexpr int V = decltype(packet)::size;
        pointwise<V, 2>(cuda_stream(s), e,
                        Assemble<E, V>{Rows<E>(k), Rows<E>(v), Rows<E>(kv), Rows<E>(k_shared), nope, rope, value});
      },
      k, v, kv, k_shared);
}

void mla_assemble_backward(Stream& s, const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv) {
  const int nope = static_cast<int>(d.nope), rope = static_cast<int>(d.rope), value = static_cast<int>(d.v);
  const Extent e{d.N, d.H * (d.nope + d.v)};
  with_packet(
      d,
      [&](auto type, auto packet) {
        using E = typename decltype(type)::type;
        constexpr int V = decltype(packet)::size;
        pointwise<V, 2>(cuda_stream(s), e, Split<E, V>{Rows<E>(dkv), Rows<E>(dk), Rows<E>(dv), nope, rope, value});
        pointwise<V, 1>(cuda_stream(s), Extent{d.N, d.rope},
                        SumHeads<E, V>{Rows<E>(dk_shared), Rows<E>(dk), nope, rope, static_cast<int>(d.H)});
      },
      dkv, dk_shared, dk, dv);
}

}  // namespace kestrel::cuda
