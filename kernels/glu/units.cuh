// The two gated units on the device: left(a) right(b), each factor with its derivative.
//
// At copy bandwidth an H200 leaves some 40 instructions and 5 special functions (2^x, 1/x) for an element of the
// forward pass, so the unit is written for few of them: e^-|x| by one 2^x, one reciprocal for the product of the
// denominators. Relative error below 2e-6.
#pragma once

#include "kernels/core/cuda.cuh"
#include "kernels/glu/glu.h"

namespace kestrel::cuda {

// value / denominator with the denominator in [1, 2], so that several can be multiplied before one is inverted.
struct Fraction {
  float value, denominator;
};

// tanh(x), given e = e^-2|x|: below 1/4, where 1 - e cancels, its Taylor series.
__device__ __forceinline__ Fraction tanh_fraction(float x, float e) {
  const float q = x * x;
  const float series = 1.f + q * (-0.333333333f + q * (0.133333333f + q * (-0.0539682540f + q * 0.0218694885f)));
  const bool small = fabsf(x) < 0.25f;
  return {small ? x * series : copysignf(1.f - e, x), small ? 1.f : 1.f + e};
}
__device__ __forceinline__ float tanh_value(float x, float e, float inverse) {
  const Fraction t = tanh_fraction(x, e);
  return t.denominator == 1.f ? t.value : t.value * inverse;
}

struct SituUnit {
  float beta, linear_beta, inverse_beta, inverse_linear_beta;
  explicit SituUnit(const Glu& g)
      : beta(g.beta),
        linear_beta(g.linear_beta),
        inverse_beta(1.f / g.beta),
        inverse_linear_beta(1.f / g.linear_beta) {}

  __device__ __forceinline__ float value(float a, float b) const {
    const float x = a * inverse_beta, y = b * inverse_linear_beta;
    const Fraction t = tanh_fraction(x, exp2_fast(fabsf(x) * (-2.f * kLog2e)));
    const Fraction u = tanh_fraction(y, exp2_fast(fabsf(y) * (-2.f * kLog2e)));
    const float e = exp2_fast(fabsf(a) * -kLog2e);
    const float inverse = reciprocal(t.denominator * u.denominator * (1.f + e));
    return (beta * linear_beta) * (t.value * u.value) * ((a < 0.f ? e : 1.f) * inverse);
  }
  __device__ __forceinline__ ValueSlope left(float a) const {
    const float x = a * inverse_beta, e = exp2_fast(fabsf(x) * (-2.f * kLog2e)), inverse = reciprocal(1.f + e);
    const float t = tanh_value(x, e, inverse), slope = 4.f * e * inverse * inverse;
    const float es = exp2_fast(fabsf(a) * -kLog2e), is = reciprocal(1.f + es);
    const float s = (a < 0.f ? es : 1.f) * is;
    return {beta * t * s, slope * s + beta * t * (es * is * is)};
  }
  __device__ __forceinline__ ValueSlope right(float b) const {
    const float x = b * inverse_linear_beta, e = exp2_fast(fabsf(x) * (-2.f * kLog2e));
    const float inverse = reciprocal(1.f + e);
    return {linear_beta * tanh_value(x, e, inverse), 4.f * e * inverse * inverse};
  }
};

struct SiluUnit {
  explicit SiluUnit(const Glu&) {}
  __device__ __forceinline__ float value(float a, float b) const {
    const float e = exp2_fast(fabsf(a) * -kLog2e);
    return a * b * ((a < 0.f ? e : 1.f) * reciprocal(1.f + e));
  }
  __device__ __forceinline__ ValueSlope left(float a) const {
    const float e = exp2_fast(fabsf(a) * -kLog2e), inverse = reciprocal(1.f + e);
    const float s = (a < 0.f ? e : 1.f) * inverse;
    return {a * s, s + a * (e * inverse * inverse)};
  }
  __device__ __forceinline__ ValueSlope right(float b) const { return {b, 1.f}; }
};

}  // namespace kestrel::cuda
