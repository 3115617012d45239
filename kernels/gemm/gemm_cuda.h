// The CUDA side of gemm.h; arguments as there, checked by the caller.
#pragma once

#include "kernels/gemm/gemm.h"

namespace kestrel::cuda {

// A product of row-major matrices on raw pointers, `batch` times: operand i begins i * (its stride) elements further.
struct GemmProblem {
  Trans ta = Trans::no, tb = Trans::no;
  int64_t M = 0, N = 0, K = 0;
  float alpha = 1.f, beta = 0.f;
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  int64_t lda = 0, ldb = 0, ldc = 0;  // elements
  DType in = DType::f32, out = DType::f32;
  int64_t batch = 1, a_stride = 0, b_stride = 0, c_stride = 0;  // elements
};

void gemm(Stream& s, const GemmProblem& p);

// Our own product: any sizes, dtypes, alignment; no scratch.  Serves what cuBLASLt has no algorithm for, and K = 0.
void gemm_plain(Stream& s, const GemmProblem& p);

}  // namespace kestrel::cuda
