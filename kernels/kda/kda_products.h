// Small dense products on one core, blocked in registers: what the chunk form of KDA is made of.
//
//   C [rows, cols] (=, = -, +=, -=) A [rows, depth] B [depth, cols]
//
// rows must be a multiple of 4 and cols of 8 (the chunk's scratch is padded so).  B and C are row-major; A is given by
// two strides, so A^T costs nothing.  An element of C is one chain of fused multiply-adds over depth in order: its bits
// depend on its row of A and its column of B alone, not on how many other rows or columns there are.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kestrel::cpu::kda {

constexpr int64_t kLanes = 8;
using Lanes = float __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));  // loads need no alignment

inline Lanes lanes_at(const float* p) {
  return *reinterpret_cast<const Lanes*>(p);
}
inline Lanes& lanes_at(float* p) {
  return *reinterpret_cast<Lanes*>(p);
}

// A(i, k) = p[i * row + k * col]
struct Left {
  const float* p;
  int64_t row, col;
};
inline Left plain(const float* p, int64_t ld) {
  return {p, ld, 1};
}
inline Left transposed(const float* p, int64_t ld) {
  return {p, 1, ld};
}

enum class Into { set, negate, add, subtract };

template <Into how>
inline void write(float* c, Lanes x) {
  if constexpr (how == Into::set) lanes_at(c) = x;
  if constexpr (how == Into::negate) lanes_at(c) = -x;
  if constexpr (how == Into::add) lanes_at(c) += x;
  if constexpr (how == Into::subtract) lanes_at(c) -= x;
}

// One block of C: 4 rows by 8 * kWide columns, held in registers over the whole depth.
template <Into how, int kWide>
inline void multiply_block(int64_t depth, Left a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  Lanes sum[4][kWide] = {};
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    Lanes right[kWide];
    for (int w = 0; w < kWide; ++w) right[w] = lanes_at(b + w * kLanes);
    for (int i = 0; i < 4; ++i) {
      const float left = a.p[i * a.row + k * a.col];
      for (int w = 0; w < kWide; ++w) sum[i][w] += left * right[w];
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int w = 0; w < kWide; ++w) write<how>(c + i * ldc + w * kLanes, sum[i][w]);
  }
}

template <Into how>
inline void multiply(int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
                     int64_t ldc) {
  const auto strip = [&](auto wide, int64_t j) {  // a strip of columns: the block of B stays in L1 for all rows
    for (int64_t i = 0; i < rows; i += 4) {
      multiply_block<how, decltype(wide)::value>(depth, {a.p + i * a.row, a.row, a.col}, b + j, ldb, c + i * ldc + j,
                                                 ldc);
    }
  };
  int64_t j = 0;
  for (; j + 3 * kLanes <= cols; j += 3 * kLanes) strip(std::integral_constant<int, 3>{}, j);
  for (; j + 2 * kLanes <= cols; j += 2 * kLanes) strip(std::integral_constant<int, 2>{}, j);
  for (; j < cols; j += kLanes) strip(std::integral_constant<int, 1>{}, j);
}

// to [cols, rows] = from [rows, cols] transposed.
inline void transpose(int64_t rows, int64_t cols, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  for (int64_t i0 = 0; i0 < rows; i0 += 8) {
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = i0; i < i0 + 8 && i < rows; ++i) to[j * ld_to + i] = from[i * ld_from + j];
    }
  }
}

}  // namespace kestrel::cpu::kda
