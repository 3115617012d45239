// Rows of an F32 matrix in host memory, and the fixed pieces over which sums over rows are taken.
//
// A parameter gradient is a sum over all rows.  Each piece of kRowsPerPiece rows sums into a partial of its own, then
// the partials are added in piece order: the bits depend on the number of rows alone, never on the number of threads.
#pragma once

#include "kernels/core/parallel.h"
#include "kernels/core/tensor.h"

namespace kestrel::cpu {

struct Rows {
  float* data;  // null for an empty tensor
  int64_t ld;
  explicit Rows(const Tensor& t) : data(t.f32()), ld(t.ld) {}
  float* operator[](int64_t r) const { return data + r * ld; }
};

constexpr int64_t kRowsPerPiece = 32;

inline int64_t row_pieces(int64_t rows) {
  return (rows + kRowsPerPiece - 1) / kRowsPerPiece;
}

// out[c] += sum_p partial[p * stride + c], p ascending, c < cols.
inline void add_pieces(float* out, const float* partial, int64_t pieces, int64_t stride, int64_t cols) {
  constexpr int64_t kColumns = 256;
  parallel_pieces(cols, kColumns, [&](int64_t first, int64_t last) {
    float sum[kColumns] = {};
    const int64_t n = last - first;
    for (int64_t p = 0; p < pieces; ++p) {
      const float* x = partial + p * stride + first;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) sum[c] += x[c];
    }
    for (int64_t c = 0; c < n; ++c) out[first + c] += sum[c];
  });
}

}  // namespace kestrel::cpu
