// The innermost products of the own CPU GEMM, one set per instruction set.
//
// Every set computes an element of C by the same operations in the same order - for each block of k a chain of fused
// multiply-adds from zero, k ascending, then C = fma(alpha, chain, beta C) - so that sets agree bit for bit.
#pragma once

#include <cstdint>

namespace kestrel::cpu {

// Operand A of a tile: element (r, k) at data[r * row + k * step].
struct TileA {
  const float* data;
  int64_t row, step;
};

// Operand B of a tile: element (k, j) at data[k * step + j].  Whole vectors are read: `width` floats of every row must
// be readable, where width is MicroKernels::panel_width(cols).
struct TileB {
  const float* data;
  int64_t step;
};

struct MicroKernels {
  const char* name;
  int rows;  // MR: rows of the largest tile
  int cols;  // NR: columns of the largest tile; a tile of at most NR / 2 columns is computed at half the width

  // C[m,n] = alpha A[m,depth] B[depth,n] + beta C, m <= rows, n <= cols.  A with row = 1, step = m is the packed form
  // and the fast one.
  void (*tile)(int m, int n, int64_t depth, TileA a, TileB b, float alpha, float beta, float* c, int64_t ldc);

  // sum over i of x[i] y[i]: 32 partial sums (i mod 32), added in one fixed tree.
  float (*dot)(int64_t n, const float* x, const float* y);

  int panel_width(int n) const { return n > cols / 2 ? cols : cols / 2; }
};

const MicroKernels& base_kernels();    // of the -march this program is compiled for
const MicroKernels* avx512_kernels();  // null when the compiler or this machine has no AVX-512
const MicroKernels& best_kernels();

}  // namespace kestrel::cpu
