// Tiles for the instruction set the program is compiled for: AVX2 with FMA, or whatever the compiler makes of loops.
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif
#include <cmath>
#include <cstring>

#include "kernels/gemm/microkernel_tile.h"

namespace kestrel::cpu {
namespace {

#if defined(__AVX2__) && defined(__FMA__)
struct Avx2 {
  using T = __m256;
  static constexpr int lanes = 8;
  static T zero() { return _mm256_setzero_ps(); }
  static T load(const float* p) { return _mm256_loadu_ps(p); }
  static T broadcast(float x) { return _mm256_set1_ps(x); }
  static T mul(T a, T b) { return _mm256_mul_ps(a, b); }
  static T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* p, T x) { _mm256_storeu_ps(p, x); }
  static T load_first(const float* p, int n) {
    float all[lanes] = {};
    std::memcpy(all, p, sizeof(float) * static_cast<size_t>(n));
    return load(all);
  }
  // Through memory: masked stores are microcoded on several AMD cores.
  static void store_first(float* p, int n, T x) {
    float all[lanes];
    store(all, x);
    std::memcpy(p, all, sizeof(float) * static_cast<size_t>(n));
  }
  static float fma1(float a, float b, float c) { return std::fma(a, b, c); }
};
// 6 x 2 sums, two vectors of B and a broadcast fill 15 of the 16 registers.
constexpr MicroKernels kBase = kernels_of<Avx2, 6>("AVX2");
#else
struct Plain {
  static constexpr int lanes = 8;
  struct T {
    float x[lanes];
  };
  static T zero() { return T{}; }
  static T load(const float* p) { return load_first(p, lanes); }
  static T broadcast(float x) {
    T y;
    for (float& e : y.x) e = x;
    return y;
  }
  static T mul(T a, T b) {
    for (int i = 0; i < lanes; ++i) a.x[i] *= b.x[i];
    return a;
  }
  static T fma(T a, T b, T c) {
    for (int i = 0; i < lanes; ++i) c.x[i] += a.x[i] * b.x[i];
    return c;
  }
  static void store(float* p, T x) { store_first(p, lanes, x); }
  static T load_first(const float* p, int n) {
    T y{};
    std::memcpy(y.x, p, sizeof(float) * static_cast<size_t>(n));
    return y;
  }
  static void store_first(float* p, int n, T x) { std::memcpy(p, x.x, sizeof(float) * static_cast<size_t>(n)); }
  static float fma1(float a, float b, float c) { return c + a * b; }
};
constexpr MicroKernels kBase = kernels_of<Plain, 4>("portable");
#endif

}  // namespace

const MicroKernels& base_kernels() {
  return kBase;
}

const MicroKernels& best_kernels() {
  static const MicroKernels* const best = avx512_kernels() ? avx512_kernels() : &kBase;
  return *best;
}

}  // namespace kestrel::cpu
