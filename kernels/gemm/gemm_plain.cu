// The plain product: for shapes and alignments that cuBLASLt has no algorithm for, and for K = 0.  Bound by shared
// memory at about a tenth of the fp32 peak; it is never on the path of a model's large products.
//
// A block computes a 64 x 64 tile of C in steps of 16 of K, a thread 4 x 4 elements of it.  An element of C is one
// chain of fused multiply-adds in the order of k, so its bits depend on the operands alone.
#include "kernels/core/cuda.cuh"
#include "kernels/gemm/gemm_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kPerThread = 4, kThreads = 256;
constexpr int64_t kMostBatches = 65535;  // of one launch

template <class In, class Out>
struct Operands {
  const In *a, *b;
  Out* c;
  int64_t M, N, K, tiles_n;
  // Element (m, k) of op(A) lies at m * a_row + k * a_step; (k, n) of op(B) at n * b_row + k * b_step.
  int64_t a_row, a_step, b_row, b_step, ldc;
  int64_t a_stride, b_stride, c_stride;
  float alpha, beta;
};

// tile[k][i] = x[(first + i) * row + (k0 + k) * step], zero outside; neighbouring threads read neighbouring elements.
template <class In>
__device__ void load_tile(float (&tile)[kDepth][kTile + 4], const In* x, int64_t first, int64_t rows, int64_t row,
                          int64_t k0, int64_t K, int64_t step) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kTile * kDepth / kThreads; ++j) {
    const int at = thread + j * kThreads;
    const int k = step == 1 ? at % kDepth : at / kTile, i = step == 1 ? at / kDepth : at % kTile;
    const bool inside = first + i < rows && k0 + k < K;
    tile[k][i] = inside ? to_float(x[(first + i) * row + (k0 + k) * step]) : 0.f;
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) gemm_plain_kernel(Operands<In, Out> p) {
  __shared__ float a[kDepth][kTile + 4], b[kDepth][kTile + 4];
  const int64_t m0 = blockIdx.x / p.tiles_n * kTile, n0 = blockIdx.x % p.tiles_n * kTile;
  const In *pa = p.a + blockIdx.y * p.a_stride, *pb = p.b + blockIdx.y * p.b_stride;
  Out* pc = p.c + blockIdx.y * p.c_stride;
  const int m = static_cast<int>(threadIdx.x) / (kTile / kPerThread) * kPerThread;
  const int n = static_cast<int>(threadIdx.x) % (kTile / kPerThread) * kPerThread;
  float sum[kPerThread][kPerThread] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += kDepth) {
    load_tile(a, pa, m0, p.M, p.a_row, k0, p.K, p.a_step);
    load_tile(b, pb, n0, p.N, p.b_row, k0, p.K, p.b_step);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] = fmaf(a[k][m + i], b[k][n + j], sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (m0 + m + i >= p.M || n0 + n + j >= p.N) continue;
      Out* c = pc + (m0 + m + i) * p.ldc + n0 + n + j;
      const float value = p.alpha * sum[i][j];
      *c = from_float<Out>(p.beta == 0.f ? value : fmaf(p.beta, to_float(*c), value));
    }
  }
}

template <class In, class Out>
void launch(cudaStream_t stream, const GemmProblem& p) {
  Operands<In, Out> o{};
  o.M = p.M, o.N = p.N, o.K = p.K, o.tiles_n = divide_up(p.N, kTile);
  o.a_row = p.ta == Trans::no ? p.lda : 1, o.a_step = p.ta == Trans::no ? 1 : p.lda;
  o.b_row = p.tb == Trans::no ? 1 : p.ldb, o.b_step = p.tb == Trans::no ? p.ldb : 1;
  o.ldc = p.ldc, o.a_stride = p.a_stride, o.b_stride = p.b_stride, o.c_stride = p.c_stride;
  o.alpha = p.alpha, o.beta = p.beta;
  const int64_t tiles = divide_up(p.M, kTile) * o.tiles_n;
  KESTREL_CHECK(tiles <= INT32_MAX, "a product of ", p.M, " x ", p.N, " elements");
  for (int64_t first = 0; first < p.batch; first += kMostBatches) {
    const int64_t count = p.batch - first < kMostBatches ? p.batch - first : kMostBatches;
    o.a = static_cast<const In*>(p.a) + first * p.a_stride;
    o.b = static_cast<const In*>(p.b) + first * p.b_stride;
    o.c = static_cast<Out*>(p.c) + first * p.c_stride;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(count));
    gemm_plain_kernel<In, Out><<<grid, kThreads, 0, stream>>>(o);
    CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace

void gemm_plain(Stream& s, const GemmProblem& p) {
  if (p.M == 0 || p.N == 0 || p.batch == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  if (p.in == DType::f32) return launch<float, float>(stream, p);
  if (p.out == DType::f32) return launch<bf16_t, float>(stream, p);
  launch<bf16_t, bf16_t>(stream, p);
}

}  // namespace kestrel::cuda
