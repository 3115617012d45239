// Tiles written over a vector type V:  V::lanes, V::T, zero, load, broadcast, mul, fma, store, and load_first /
// store_first of fewer than `lanes` elements.  Included once per instruction set, inside that set's compile options.
#pragma once

#include "kernels/gemm/microkernel.h"

namespace kestrel::cpu {

// C[R, n] for (NV-1) lanes < n <= NV lanes or n = NV lanes.  The R x NV sums live in registers.
template <class V, int R, int NV, bool kPacked>
void tile_rn(int n, int64_t depth, TileA a, TileB b, float alpha, float beta, float* c, int64_t ldc) {
  typename V::T sum[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[r][v] = V::zero();

  const float *pa = a.data, *pb = b.data;
  for (int64_t k = 0; k < depth; ++k) {
    typename V::T row[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) row[v] = V::load(pb + v * V::lanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename V::T x = V::broadcast(kPacked ? pa[r] : pa[r * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = V::fma(x, row[v], sum[r][v]);
    }
    pa += kPacked ? R : a.step;
    pb += b.step;
  }

  const typename V::T va = V::broadcast(alpha), vb = V::broadcast(beta);
  const int whole = n / V::lanes, rest = n % V::lanes;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* out = c + r * ldc + v * V::lanes;
      if (v < whole) {
        V::store(out, beta == 0.f ? V::mul(va, sum[r][v]) : V::fma(va, sum[r][v], V::mul(vb, V::load(out))));
      } else if (v == whole && rest > 0) {
        V::store_first(
            out, rest,
            beta == 0.f ? V::mul(va, sum[r][v]) : V::fma(va, sum[r][v], V::mul(vb, V::load_first(out, rest))));
      }
    }
  }
}

template <class V, int R, int NV>
void tile_r(int n, int64_t depth, TileA a, TileB b, float alpha, float beta, float* c, int64_t ldc) {
  if (a.row == 1 && a.step == R) {
    tile_rn<V, R, NV, true>(n, depth, a, b, alpha, beta, c, ldc);
  } else {
    tile_rn<V, R, NV, false>(n, depth, a, b, alpha, beta, c, ldc);
  }
}

template <class V, int R>
void tile_any_width(int n, int64_t depth, TileA a, TileB b, float alpha, float beta, float* c, int64_t ldc) {
  if (n > V::lanes) {
    tile_r<V, R, 2>(n, depth, a, b, alpha, beta, c, ldc);
  } else {
    tile_r<V, R, 1>(n, depth, a, b, alpha, beta, c, ldc);
  }
}

// The tile of 1 <= m <= MR rows: counts MR down to m.
template <class V, int MR>
void tile_any(int m, int n, int64_t depth, TileA a, TileB b, float alpha, float beta, float* c, int64_t ldc) {
  if constexpr (MR > 1) {
    if (m < MR) return tile_any<V, MR - 1>(m, n, depth, a, b, alpha, beta, c, ldc);
  }
  tile_any_width<V, MR>(n, depth, a, b, alpha, beta, c, ldc);
}

template <class V>
float dot_of(int64_t n, const float* x, const float* y) {
  constexpr int kSums = 32, kVectors = kSums / V::lanes;
  typename V::T sum[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sum[v] = V::zero();
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[v] = V::fma(V::load(x + i + v * V::lanes), V::load(y + i + v * V::lanes), sum[v]);
  }
  float part[kSums];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) V::store(part + v * V::lanes, sum[v]);
  for (int l = 0; i < n; ++i, ++l) part[l] = V::fma1(x[i], y[i], part[l]);
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) part[l] += part[l + half];
  }
  return part[0];
}

template <class V, int MR>
constexpr MicroKernels kernels_of(const char* name) {
  return {name, MR, 2 * V::lanes, tile_any<V, MR>, dot_of<V>};
}

}  // namespace kestrel::cpu
