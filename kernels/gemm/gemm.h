// Matrix products.
//
//   C = alpha op(A) op(B) + beta C        row-major; op is the identity or the transpose; any leading dimensions
//
// dtypes: F32 x F32 -> F32 (CPU and CUDA);  BF16 x BF16 -> BF16 or F32 with fp32 accumulation (CUDA).
// beta = 0 never reads C (it may hold NaN).  Nothing is saved.  Sizes may be 0: M or N = 0 does nothing, K = 0 scales
// C.
//
// Both CPU products give the same bits for every thread count: the own one computes an element of C in one thread over
// k in order, OpenBLAS is called on pieces of C that depend on the shape alone.  kernels/gemm/README.md has the
// details.
//
// CUDA: cuBLASLt, with one algorithm per shape, leading dimensions and alignment, chosen by its heuristic (no timing:
// two runs choose alike) and an own plain product where it has none.  F32 products are true fp32, no TF32.  One
// workspace of 32 MiB per device, taken at the first product: products of one device must be queued in one order (one
// stream, or streams that wait for each other).
#pragma once

#include <string>

#include "kernels/core/stream.h"

namespace kestrel {

enum class Trans : uint8_t { no, yes };

void gemm(Stream& s, Tensor c, Tensor a, Trans ta, Tensor b, Trans tb, float alpha = 1.f, float beta = 0.f);

// The same for every i: c[i], a[i], b[i] of rank-3 contiguous tensors [n, rows, cols].
void gemm_batched(Stream& s, Tensor c, Tensor a, Trans ta, Tensor b, Trans tb, float alpha = 1.f, float beta = 0.f);

// y[N,out] = x[N,in] w[out,in]^T
void linear_forward(Stream& s, Tensor y, Tensor x, Tensor w);
// dx[N,in] = dy w + dx_beta dx  (skipped when dx is empty);   dw[out,in] += dy^T x  (skipped when dw is empty)
// On CUDA dy may be F32 beside BF16 x and w (the router's logits are F32): it is rounded to their dtype in scratch
// first, as every other gradient of an activation is.
void linear_backward(Stream& s, Tensor dx, Tensor dw, Tensor dy, Tensor x, Tensor w, float dx_beta = 0.f);

// Which product serves the CPU; OpenBLAS from the start where there is one.  Built without it only `own` exists:
// choosing the other throws ConfigError.
enum class CpuGemm : uint8_t { own, openblas };
bool has_openblas();
void set_cpu_gemm(CpuGemm g);
CpuGemm cpu_gemm();
std::string cpu_gemm_description();  // "own AVX2 GEMM", "OpenBLAS 0.3.21 (Haswell)"

namespace cpu {
// C[M,N] = alpha op(A) op(B) + beta C, all threads, with the product chosen by set_cpu_gemm; inside a parallel region
// the same as sgemm_serial.
void sgemm(Trans ta, Trans tb, int64_t M, int64_t N, int64_t K, float alpha, const float* A, int64_t lda,
           const float* B, int64_t ldb, float beta, float* C, int64_t ldc);
// The own product on the calling thread alone: for use inside parallel loops.  Same bits as `sgemm` with CpuGemm::own.
void sgemm_serial(Trans ta, Trans tb, int64_t M, int64_t N, int64_t K, float alpha, const float* A, int64_t lda,
                  const float* B, int64_t ldb, float beta, float* C, int64_t ldc);
}  // namespace cpu

}  // namespace kestrel
