// Small dense products on one core, blocked in registers: what the chunk form of KDA is made of.
//
//   C [rows, cols] (=, = -, +=, -=) A [rows, depth] B [depth, cols]
//
// rows and cols must be multiples of 8 (the chunk's scratch is padded so).  B and C are row-major; A is given by two
// strides, so A^T costs nothing.  An element of C is one chain of fused multiply-adds over depth in order: its bits
// depend on its row of A and its column of B alone, not on how many other rows or columns there are, nor on the width
// of the machine's vectors.
#pragma once

#include <cstdint>

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

void multiply(Into how, int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
              int64_t ldc);

// to [cols, rows] = from [rows, cols] transposed.
inline void transpose(int64_t rows, int64_t cols, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  for (int64_t i0 = 0; i0 < rows; i0 += 8) {
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = i0; i < i0 + 8 && i < rows; ++i) to[j * ld_to + i] = from[i * ld_from + j];
    }
  }
}

}  // namespace kestrel::cpu::kda
