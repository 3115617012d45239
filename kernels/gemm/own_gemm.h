// The own product over a chosen set of microkernels; gemm.h is the door for everybody else.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/gemm/microkernel.h"

namespace kestrel::cpu {

struct Product {
  Trans ta, tb;
  int64_t M, N, K;
  float alpha;
  const float* A;
  int64_t lda;
  const float* B;
  int64_t ldb;
  float beta;
  float* C;
  int64_t ldc;
};

void own_serial(const MicroKernels& set, const Product& p);
// The same bits on all threads: C is cut into one block per thread.
void own_parallel(const MicroKernels& set, const Product& p);

}  // namespace kestrel::cpu
