// For kernels: element types, 16-byte accesses, reductions whose order is fixed, activation functions.
//
// Kernels are templates on the element type in memory (float or bf16_t) and on V, the elements one thread takes at a
// time: the host picks the wide V when `wide` says that every pointer, ld and width allows it, and V = 1 otherwise.
// Arithmetic is in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/core/cuda.h"
#include "kernels/core/tensor.h"

namespace kestrel::cuda {

using bf16_t = __nv_bfloat16;  // the device's view of kestrel::bf16: the same 16 bits
constexpr int kWarp = 32;

// ---------------------------------------------------------------- element types

// The elements of t, whose dtype must be T's.
template <class T>
T* data_of(const Tensor& t) {
  if constexpr (std::is_same_v<T, bf16_t>) {
    return reinterpret_cast<bf16_t*>(t.as<bf16>());
  } else {
    return t.as<T>();
  }
}

template <class T>
struct Type {
  using type = T;
};
// f(Type<float>{}) or f(Type<bf16_t>{}), by dtype: with_activation(x.dtype, [&](auto e) { using T = typename
// decltype(e)::type; ... }).
template <class F>
void with_activation(DType dtype, F&& f) {
  if (dtype == DType::f32) return f(Type<float>{});
  KESTREL_CHECK(dtype == DType::bf16, "activations are F32 or BF16 on CUDA, got ", name_of(dtype));
  f(Type<bf16_t>{});
}

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16_t x) {
  return __bfloat162float(x);
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// ---------------------------------------------------------------- wide accesses

// True when rows of t can be read V elements at a time with accesses of up to 16 bytes.  Empty tensors are.
inline bool wide(const Tensor& t, int V) {
  if (t.empty()) return true;
  const int64_t bytes = V * size_of(t.dtype), step = bytes < 16 ? bytes : 16;
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(step) == 0 && t.cols() % V == 0 &&
         (t.ld % V == 0 || t.rows() <= 1);
}
template <class... Tensors>
bool all_wide(int V, const Tensors&... t) {
  return (wide(t, V) && ...);
}

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};
template <class T>
constexpr int kPerAccess = 16 / static_cast<int>(sizeof(T));
template <class T>
using Vec16 = Pack<T, kPerAccess<T>>;

// once: the line will not be read again soon (evict first).  constant: nobody writes it while the kernel runs, so loads
// may move past stores.
enum class Cache { keep, once, constant };

template <Cache cache, class Raw>
__device__ __forceinline__ Raw load_raw(const Raw* p) {
  if constexpr (cache == Cache::once) {
    return __ldcs(p);
  } else if constexpr (cache == Cache::constant) {
    return __ldg(p);
  } else {
    return *p;
  }
}
template <Cache cache, class Raw>
__device__ __forceinline__ void store_raw(Raw* p, Raw x) {
  if constexpr (cache == Cache::once) {
    __stcs(p, x);
  } else {
    *p = x;
  }
}

// The unsigned type of an access of `bytes` bytes.
template <int bytes>
using Raw = std::conditional_t<
    bytes == 16, uint4,
    std::conditional_t<bytes == 8, uint2, std::conditional_t<bytes == 4, unsigned int, unsigned short>>>;

// V elements as they lie in memory, to be read in accesses of up to 16 bytes, to which p must be aligned.  Keeps a row
// in half the registers that floats would take.
template <class T, int V>
struct Packed {
  static constexpr int kBytes = V * static_cast<int>(sizeof(T)) < 16 ? V * static_cast<int>(sizeof(T)) : 16;
  static constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  static constexpr int kAccesses = V / kElements;
  using Word = Raw<kBytes>;
  union Chunk {
    Word raw;
    T v[kElements];
    __device__ Chunk() {}
  };
  Chunk chunk[kAccesses];

  template <Cache cache = Cache::keep>
  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) chunk[i].raw = load_raw<cache>(reinterpret_cast<const Word*>(p) + i);
  }
  template <Cache cache = Cache::keep>
  __device__ __forceinline__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) store_raw<cache>(reinterpret_cast<Word*>(p) + i, chunk[i].raw);
  }
  __device__ __forceinline__ void unpack(float (&x)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = to_float(chunk[i / kElements].v[i % kElements]);
  }
  __device__ __forceinline__ void pack(const float (&x)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) chunk[i / kElements].v[i % kElements] = from_float<T>(x[i]);
  }
};

// x[i] = p[i], i < V.
template <int V, Cache cache = Cache::keep, class T>
__device__ __forceinline__ void load(float (&x)[V], const T* p) {
  Packed<T, V> packed;
  packed.template load<cache>(p);
  packed.unpack(x);
}

// p[i] = x[i] rounded to T, i < V.
template <int V, Cache cache = Cache::keep, class T>
__device__ __forceinline__ void store(T* p, const float (&x)[V]) {
  Packed<T, V> packed;
  packed.pack(x);
  packed.template store<cache>(p);
}

// ---------------------------------------------------------------- reductions

// Over the warp, by a butterfly: every lane gets the same bits.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
__device__ __forceinline__ int warp_sum(int x) {
  return __reduce_add_sync(0xffffffffu, x);
}

// Over the lanes up to and with this one.
template <class T>
__device__ __forceinline__ T warp_scan(T x) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T left = __shfl_up_sync(0xffffffffu, x, step);
    if (static_cast<int>(threadIdx.x % kWarp) >= step) x += left;
  }
  return x;
}

// Over the block, warps in order: every thread gets the same bits.  All threads call it; `shared` holds one number per
// warp and is free again on return.
template <int threads, class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
  static_assert(threads % kWarp == 0 && threads <= 1024);
  x = warp_sum(x);
  if constexpr (threads == kWarp) return x;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int w = 0; w < threads / kWarp; ++w) sum += shared[w];
  __syncthreads();
  return sum;
}
template <int threads>
__device__ __forceinline__ float block_max(float x, float* shared) {
  static_assert(threads % kWarp == 0 && threads <= 1024);
  x = warp_max(x);
  if constexpr (threads == kWarp) return x;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  float highest = shared[0];
#pragma unroll
  for (int w = 1; w < threads / kWarp; ++w) highest = fmaxf(highest, shared[w]);
  __syncthreads();
  return highest;
}

// Over groups of G threads, of which a block of `threads` holds threads / G, lane by lane: within a warp no
// synchronisation, otherwise G must be the whole block.  Every thread of the group gets the same bits.
template <int G, int threads>
__device__ __forceinline__ float group_sum(float x, float* shared) {
  static_assert((G & (G - 1)) == 0 && (G <= kWarp || G == threads));
  if constexpr (G <= kWarp) {
#pragma unroll
    for (int mask = G / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  } else {
    return block_sum<threads>(x, shared);
  }
}

// ---------------------------------------------------------------- activation functions

// One special-function instruction each: 2^x and 1/x within 2 ulp, subnormal results and arguments as zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// e^x; the rounding of x log2(e) adds a relative error of |x| 6e-8.
constexpr float kLog2e = 1.44269504f;
__device__ __forceinline__ float exp_fast(float x) {
  return exp2_fast(x * kLog2e);
}

// A function and its derivative from one exponential.  Both keep their relative accuracy in the tails, where s (1 - s)
// formed from the rounded function would be noise.
struct ValueSlope {
  float value, slope;
};
__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal(1.f + exp_fast(-x));
}
__device__ __forceinline__ ValueSlope sigmoid_slope(float x) {
  const float e = exp_fast(-fabsf(x)), inverse = reciprocal(1.f + e);
  return {(x < 0.f ? e : 1.f) * inverse, e * inverse * inverse};
}
__device__ __forceinline__ float silu(float x) {
  return x * sigmoid(x);
}
__device__ __forceinline__ ValueSlope silu_slope(float x) {
  const ValueSlope s = sigmoid_slope(x);
  return {x * s.value, s.value + x * s.slope};
}
// tanh through e^-2|x|; below 1/4, where the difference cancels, its Taylor series.
__device__ __forceinline__ float tanh_fast(float x) {
  const float a = fabsf(x), q = x * x, e = exp_fast(-2.f * a);
  const float series = 1.f + q * (-0.333333333f + q * (0.133333333f + q * (-0.0539682540f + q * 0.0218694885f)));
  return a < 0.25f ? x * series : copysignf((1.f - e) * reciprocal(1.f + e), x);
}

}  // namespace kestrel::cuda
