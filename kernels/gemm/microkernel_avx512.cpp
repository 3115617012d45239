// Tiles for AVX-512, compiled into every x86 program and chosen when the machine has it.
#include "kernels/gemm/microkernel.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__GNUC__) && !defined(__clang__)
#include <cmath>
#include <cstdint>

// Up to pop_options the compiler may use AVX-512: none of it is reached on a machine without it.
#pragma GCC push_options
#pragma GCC target("avx512f")
#include <immintrin.h>

#include "kernels/gemm/microkernel_tile.h"

namespace kestrel::cpu {
namespace {

struct Avx512 {
  using T = __m512;
  static constexpr int lanes = 16;
  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static T zero() { return _mm512_setzero_ps(); }
  static T load(const float* p) { return _mm512_loadu_ps(p); }
  static T broadcast(float x) { return _mm512_set1_ps(x); }
  static T mul(T a, T b) { return a * b; }
  static T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, T x) { _mm512_storeu_ps(p, x); }
  static T load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(float* p, int n, T x) { _mm512_mask_storeu_ps(p, first(n), x); }
  static float fma1(float a, float b, float c) { return std::fma(a, b, c); }
};
// 12 x 2 sums of the 32 registers.
constexpr MicroKernels kAvx512 = kernels_of<Avx512, 12>("AVX-512");

}  // namespace
}  // namespace kestrel::cpu

#pragma GCC pop_options

namespace kestrel::cpu {

const MicroKernels* avx512_kernels() {
  static const bool here = __builtin_cpu_supports("avx512f");
  return here ? &kAvx512 : nullptr;
}

}  // namespace kestrel::cpu

#else

namespace kestrel::cpu {
const MicroKernels* avx512_kernels() {
  return nullptr;
}
}  // namespace kestrel::cpu

#endif
