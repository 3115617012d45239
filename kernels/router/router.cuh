// Scores and their order on the device.  Included by this room only.
#pragma once

#include <climits>

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kTinySum = 1e-20f;  // the CPU's

// The one place where a score is made: routing, histogram and margins see the same bits.  A score decides, so the
// exponential and the quotient are those of full precision, and the sum between them is never fused with a product of
// the exponential: the bits do not depend on the kernel around it.
__device__ __forceinline__ float router_score(float logit) {
  return __frcp_rn(__fadd_rn(1.f, expf(-logit)));
}

// An integer with the order of the floats: -0 ties with +0, a NaN is below everything.
__device__ __forceinline__ int order_key(float v) {
  const int b = __float_as_int(v + 0.f);
  const int key = b ^ ((b >> 31) & 0x7fffffff);
  return v != v ? INT_MIN : key;
}
__device__ __forceinline__ float value_of_key(int key) {
  return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}

}  // namespace kestrel::cuda
