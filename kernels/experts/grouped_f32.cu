// Grouped products of F32 operands: true fp32, fused multiply-adds.  Bound by the FMA units; for checking a model in
// F32, not for training speed.
//
// A block computes a 128 x 128 tile in steps of 16 of K, a thread 8 x 8 of it (4 + 4 rows, 4 + 4 columns, so that its
// float4 reads of shared memory are free of conflicts).  The next step's elements travel through registers while the
// present one is computed.  An element of D is one chain of FMAs in the order of k: its bits depend on the operands
// alone.  Elements outside the expert's rows or the matrix are zeros in shared memory and are not read.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/grouped_tiles.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kTile = 128, kDepth = 16, kThreads = 256, kLd = kTile + 4;
constexpr int kEach = kTile * kDepth / kThreads;  // elements of an operand per thread and step

// One operand of a tile: element (i, k), i along M or N, lies at x[i * ld + k] if k_major, else at x[k * ld + i].
// A thread takes kEach elements of one column in memory, kJump rows apart; neighbouring threads, neighbouring columns.
template <bool k_major>
class Operand {
 public:
  // i < wide and k < depth are inside; x is element (0, 0).
  __device__ __forceinline__ Operand(const float* x, int64_t ld, int64_t wide, int64_t depth)
      : x_(x + slow() * ld + fast()), ld_(ld), wide_(static_cast<int>(min(wide, int64_t{kTile}))), depth_(depth) {}

  // The next kDepth of k.
  __device__ __forceinline__ void load(float (&r)[kEach]) {
    const int deep = static_cast<int>(min(depth_, int64_t{kDepth}));
    const bool column = fast() < (k_major ? deep : wide_);
    const int rows = (k_major ? wide_ : deep) - slow();
#pragma unroll
    for (int j = 0; j < kEach; ++j) r[j] = column && j * kJump < rows ? __ldg(x_ + j * kJump * ld_) : 0.f;
    x_ += k_major ? kDepth : kDepth * ld_;
    depth_ -= kDepth;
  }
  static __device__ __forceinline__ void store(float (&tile)[kDepth][kLd], const float (&r)[kEach]) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int row = slow() + j * kJump;
      tile[k_major ? fast() : row][k_major ? row : fast()] = r[j];
    }
  }

 private:
  static constexpr int kCols = k_major ? kDepth : kTile, kJump = kThreads / kCols;
  static __device__ __forceinline__ int fast() {
    return static_cast<int>(threadIdx.x) % kCols;
  }
  static __device__ __forceinline__ int slow() {
    return static_cast<int>(threadIdx.x) / kCols;
  }
  const float* x_;
  const int64_t ld_;
  const int wide_;
  int64_t depth_;
};

template <Grouped what>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_f32_kernel(GroupedShape shape, const float* __restrict__ pa, int64_t lda, const float* __restrict__ pb,
                       int64_t ldb, float* __restrict__ pd, int64_t ldd, int64_t K) {
  constexpr bool weight = what == Grouped::backward_weight;
  using A = Operand<!weight>;
  using B = Operand<what == Grouped::forward>;
  __shared__ alignas(16) float a[kDepth][kLd], b[kDepth][kLd];
  const int ty = static_cast<int>(threadIdx.x) / 16, tx = static_cast<int>(threadIdx.x) % 16;
  TileWalk<what, kTile, kTile> walk(shape);
  GroupedTile t;
  while (walk.next(t)) {
    const int64_t m0 = int64_t{t.m} * kTile, n0 = int64_t{t.n} * kTile, rows = t.end - t.begin;
    const int64_t m_inside = (weight ? shape.M : rows) - m0, n_inside = shape.N - n0, depth = weight ? rows : K;
    const int64_t matrix = int64_t{t.expert} * shape.N * (weight ? shape.M : K);  // elements before w[e] or dw[e]
    A at(pa + (weight ? t.begin * lda + m0 : (t.begin + m0) * lda), lda, m_inside, depth);
    B bt(pb + (weight                     ? t.begin * ldb + n0
               : what == Grouped::forward ? matrix + n0 * ldb
                                          : matrix + n0),
         ldb, n_inside, depth);
    float sum[8][8] = {}, ra[kEach], rb[kEach];
    at.load(ra);
    bt.load(rb);
    for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
      __syncthreads();  // the step before is computed
      A::store(a, ra);
      B::store(b, rb);
      __syncthreads();
      at.load(ra);
      bt.load(rb);
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        float x[8], y[8];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<float4*>(x + 4 * h) = *reinterpret_cast<const float4*>(&a[k][64 * h + 4 * ty]);
          *reinterpret_cast<float4*>(y + 4 * h) = *reinterpret_cast<const float4*>(&b[k][64 * h + 4 * tx]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
      }
    }
    float* d = pd + (weight ? matrix + m0 * ldd : (t.begin + m0) * ldd) + n0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = i / 4 * 64 + 4 * ty + i % 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int n = j / 4 * 64 + 4 * tx + j % 4;
        if (m >= m_inside || n >= n_inside) continue;
        if constexpr (weight) {
          d[m * ldd + n] += sum[i][j];
        } else {
          d[m * ldd + n] = sum[i][j];
        }
      }
    }
  }
}

template <Grouped what>
void launch(cudaStream_t stream, const GroupedProblem& p) {
  grouped_f32_kernel<what><<<grouped_grid(p, kTile, kTile, 2), kThreads, 0, stream>>>(
      shape_of(p), static_cast<const float*>(p.a), p.lda, static_cast<const float*>(p.b), p.ldb,
      static_cast<float*>(p.d), p.ldd, p.K);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void grouped_f32(Stream& s, const GroupedProblem& p) {
  with_product(p.what, [&](auto what) { launch<what()>(cuda_stream(s), p); });
}

}  // namespace kestrel::cuda
