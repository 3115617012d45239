// The blocks behind `multiply`, for any width of vectors.  Included by one file per instruction set; everything is in
// an unnamed namespace, so that no two of them share a function.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/kda/kda_products.h"

namespace kestrel::cpu::kda {
namespace {

template <int kFloats>
struct VectorOf {
  typedef float type __attribute__((vector_size(kFloats * 4)));
};

// Through memcpy: any address will do.
template <class V>
inline V load(const float* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <Into how, class V>
inline void write(float* c, V x) {
  if constexpr (how == Into::negate) x = -x;
  if constexpr (how == Into::add) x = load<V>(c) + x;
  if constexpr (how == Into::subtract) x = load<V>(c) - x;
  std::memcpy(c, &x, sizeof x);
}

// One block of C: kRows rows by kWide vectors, held in registers over the whole depth.
template <Into how, class V, int kRows, int kWide>
inline void block(int64_t depth, Left a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  constexpr int64_t lanes = sizeof(V) / sizeof(float);
  V sum[kRows][kWide] = {};
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    V right[kWide];
    for (int w = 0; w < kWide; ++w) right[w] = load<V>(b + w * lanes);
    for (int i = 0; i < kRows; ++i) {
      const float left = a.p[i * a.row + k * a.col];
      for (int w = 0; w < kWide; ++w) sum[i][w] += left * right[w];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int w = 0; w < kWide; ++w) write<how>(c + i * ldc + w * lanes, sum[i][w]);
  }
}

struct Sizes {
  int64_t rows, cols, depth;
};

// Columns from j on, as many strips of kWide vectors as fit: a strip of B stays in the cache for all rows.
template <Into how, int kFloats, int kRows, int kWide>
inline void strips(int64_t& j, Sizes n, Left a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  using V = typename VectorOf<kFloats>::type;
  for (; j + kWide * kFloats <= n.cols; j += kWide * kFloats) {
    for (int64_t i = 0; i < n.rows; i += kRows) {
      block<how, V, kRows, kWide>(n.depth, {a.p + i * a.row, a.row, a.col}, b + j, ldb, c + i * ldc + j, ldc);
    }
  }
}

// Calls f with `how` as a constant.
template <class F>
inline void with_constant(Into how, F&& f) {
  switch (how) {
    case Into::set:
      return f(std::integral_constant<Into, Into::set>{});
    case Into::negate:
      return f(std::integral_constant<Into, Into::negate>{});
    case Into::add:
      return f(std::integral_constant<Into, Into::add>{});
    case Into::subtract:
      return f(std::integral_constant<Into, Into::subtract>{});
  }
}

}  // namespace
}  // namespace kestrel::cpu::kda
