// Grouped products of BF16 operands by mma.sync: any size, any alignment, sm_80 and newer.  Bound by the issue of
// tensor-core instructions and, for few rows, by reading the weights.
//
// A block of 8 warps computes a 128 x 128 tile in steps of 32 of K, a warp 64 x 32 of it; three steps are in flight
// through cp.async.  Where pointers, ld and widths are not multiples of 16 bytes, elements are copied one by one
// instead.  Elements outside the expert's rows or the matrix are zeros in shared memory and are not read.
//
// Operands lie in shared memory as in global memory; ldmatrix transposes where k is not the dense index:
//   k-major   [128 rows along M or N][32 along k], row stride 80 bytes
//   otherwise [32 rows along k][128 along M or N], row stride 272 bytes
// Eight rows, 80 or 272 bytes apart, begin in eight different 16-byte banks: no conflicts.
#include "kernels/core/cuda.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/experts/grouped_tiles.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kTile = 128, kDepth = 32, kThreads = 256, kStages = 3;

template <bool k_major>
struct Layout {
  static constexpr int kRows = k_major ? kTile : kDepth, kCols = k_major ? kDepth : kTile;
  static constexpr int kLd = kCols + 8, kElements = kRows * kLd;
};

// One operand: element (i, k), i along M or N, lies at x[i * ld + k] if k_major, else at x[k * ld + i].
template <bool k_major, bool aligned>
struct Operand {
  using L = Layout<k_major>;
  const bf16_t* x;
  int64_t ld, wide, depth;  // i < wide and k < depth are inside

  __device__ __forceinline__ void load(bf16_t* tile, int64_t k0) const {
    constexpr int kChunks = L::kCols / 8;  // of a row
    const int64_t slow = k_major ? wide : depth - k0, fast = k_major ? depth - k0 : wide;
    const bf16_t* first = x + (k_major ? k0 : k0 * ld);
#pragma unroll
    for (int j = 0; j < L::kRows * kChunks / kThreads; ++j) {
      const int at = static_cast<int>(threadIdx.x) + j * kThreads, r = at / kChunks, c = at % kChunks * 8;
      bf16_t* to = tile + r * L::kLd + c;
      const bf16_t* from = first + r * ld + c;
      if constexpr (aligned) {
        const bool inside = r < slow && c < fast;
        copy16_async(to, inside ? from : x, inside);
      } else {
        alignas(16) bf16_t v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = r < slow && c + i < fast ? from[i] : __float2bfloat16_rn(0.f);
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v);
      }
    }
  }
};

// A[m0.. 16][k0.. 16], the fragment of mma_16x8x16: tiles (m, k) = (0,0) (8,0) (0,8) (8,8).
template <bool k_major>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const bf16_t* tile, int m0, int k0, int lane) {
  if constexpr (k_major) {
    ldmatrix_x4(a, tile + (m0 + lane % 16) * Layout<true>::kLd + k0 + lane / 16 * 8);
  } else {
    ldmatrix_x4_trans(a, tile + (k0 + lane / 16 * 8 + lane % 8) * Layout<false>::kLd + m0 + lane / 8 % 2 * 8);
  }
}
// B[k0.. 16][n0.. 16], fragments of two products: tiles (k, n) = (0,0) (8,0) (0,8) (8,8).
template <bool k_major>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const bf16_t* tile, int n0, int k0, int lane) {
  if constexpr (k_major) {
    ldmatrix_x4(b, tile + (n0 + lane / 16 * 8 + lane % 8) * Layout<true>::kLd + k0 + lane / 8 % 2 * 8);
  } else {
    ldmatrix_x4_trans(b, tile + (k0 + lane % 16) * Layout<false>::kLd + n0 + lane / 16 * 8);
  }
}

template <bool aligned>
__device__ __forceinline__ void put(bf16_t* d, float x0, float x1, bool second) {
  if constexpr (aligned) {
    *reinterpret_cast<uint32_t*>(d) = pack_bf16(x0, x1);
  } else {
    d[0] = __float2bfloat16_rn(x0);
    if (second) d[1] = __float2bfloat16_rn(x1);
  }
}
template <bool aligned>
__device__ __forceinline__ void put(float* d, float x0, float x1, bool second) {  // adds
  if constexpr (aligned) {
    float2 v = *reinterpret_cast<const float2*>(d);
    v.x += x0, v.y += x1;
    *reinterpret_cast<float2*>(d) = v;
  } else {
    d[0] += x0;
    if (second) d[1] += x1;
  }
}

template <Grouped what>
using Result = std::conditional_t<what == Grouped::backward_weight, float, bf16_t>;

template <Grouped what>
constexpr int kShared = kStages* static_cast<int>(sizeof(bf16_t)) *
                        (Layout<what != Grouped::backward_weight>::kElements +
                         Layout<what == Grouped::forward>::kElements);

template <Grouped what, bool aligned>
__global__ void __launch_bounds__(kThreads, aligned ? 2 : 1)
    grouped_mma_kernel(GroupedShape shape, const bf16_t* __restrict__ pa, int64_t lda, const bf16_t* __restrict__ pb,
                       int64_t ldb, Result<what>* __restrict__ pd, int64_t ldd, int64_t K) {
  constexpr bool weight = what == Grouped::backward_weight;
  constexpr bool a_k = !weight, b_k = what == Grouped::forward;
  constexpr int kA = Layout<a_k>::kElements, kStage = kA + Layout<b_k>::kElements;
  extern __shared__ __align__(16) unsigned char raw[];
  bf16_t* const shared = reinterpret_cast<bf16_t*>(raw);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int wm = warp / 4 * 64, wn = warp % 4 * 32;  // this warp's part of the tile
  TileWalk<what, kTile, kTile> walk(shape);
  GroupedTile t;
  while (walk.next(t)) {
    const int64_t m0 = int64_t{t.m} * kTile, n0 = int64_t{t.n} * kTile, rows = t.end - t.begin;
    const int64_t m_inside = (weight ? shape.M : rows) - m0, n_inside = shape.N - n0, depth = weight ? rows : K;
    const int64_t matrix = int64_t{t.expert} * shape.N * (weight ? shape.M : K);  // elements before w[e] or dw[e]
    Operand<a_k, aligned> a{pa, lda, m_inside, depth};
    Operand<b_k, aligned> b{pb, ldb, n_inside, depth};
    if constexpr (weight) {
      a.x += t.begin * lda + m0;
      b.x += t.begin * ldb + n0;
    } else {
      a.x += (t.begin + m0) * lda;
      b.x += matrix + (b_k ? n0 * ldb : n0);
    }
    const int64_t steps = (depth + kDepth - 1) / kDepth;
    const auto load = [&](int64_t step) {
      if (step < steps) {
        bf16_t* stage = shared + step % kStages * kStage;
        a.load(stage, step * kDepth);
        b.load(stage + kA, step * kDepth);
      }
      commit_copies();  // an empty group where nothing is left keeps the count of groups
    };
    __syncthreads();  // the tile before is computed
    for (int64_t step = 0; step < kStages - 1; ++step) load(step);
    float sum[4][4][4] = {};  // [16 rows each][8 columns each][fragment]
    for (int64_t step = 0; step < steps; ++step) {
      wait_copies<kStages - 2>();
      __syncthreads();
      load(step + kStages - 1);  // into the stage that every warp has left
      const bf16_t *sa = shared + step % kStages * kStage, *sb = sa + kA;
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        uint32_t fb[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) load_b<b_k>(fb[j], sb, wn + 16 * j, k, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t fa[4];
          load_a<a_k>(fa, sa, wm + 16 * i, k, lane);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t one[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
            mma_16x8x16(sum[i][j], fa, one);
          }
        }
      }
    }
    Result<what>* d = pd + (weight ? matrix + m0 * ldd : (t.begin + m0) * ldd) + n0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = wm + 16 * i + 8 * half + lane / 4;
        if (m >= m_inside) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = wn + 8 * j + lane % 4 * 2;
          if (n >= n_inside) continue;
          put<aligned>(d + m * ldd + n, sum[i][j][2 * half], sum[i][j][2 * half + 1], n + 1 < n_inside);
        }
      }
    }
  }
}

template <Grouped what, bool aligned>
void launch(cudaStream_t stream, const GroupedProblem& p) {
  const auto kernel = grouped_mma_kernel<what, aligned>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared<what>));
  kernel<<<grouped_grid(p, kTile, kTile, 2), kThreads, kShared<what>, stream>>>(
      shape_of(p), static_cast<const bf16_t*>(p.a), p.lda, static_cast<const bf16_t*>(p.b), p.ldb,
      static_cast<Result<what>*>(p.d), p.ldd, p.K);
  CUDA_CHECK(cudaGetLastError());
}

template <Grouped what>
void launch(cudaStream_t stream, const GroupedProblem& p) {
  const auto sixteen = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  const bool widths = p.N % 8 == 0 && (what == Grouped::backward_weight ? p.M : p.K) % 8 == 0;
  const bool aligned =
      widths && p.lda % 8 == 0 && p.ldb % 8 == 0 && p.ldd % 8 == 0 && sixteen(p.a) && sixteen(p.b) && sixteen(p.d);
  aligned ? launch<what, true>(stream, p) : launch<what, false>(stream, p);
}

}  // namespace

void grouped_mma(Stream& s, const GroupedProblem& p) {
  with_product(p.what, [&](auto what) { launch<what()>(cuda_stream(s), p); });
}

}  // namespace kestrel::cuda
