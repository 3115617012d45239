// Grouped products of BF16 operands on Hopper.  Bound by the tensor cores from some hundred rows per expert on.
//
// One block per multiprocessor walks over tiles of 128 x BN.  One thread of its third warpgroup, the producer, issues
// tensor copies (TMA) of 128 x 64 of A and 64 x BN of B per step of K into a ring of stages; two warpgroups of 128
// threads compute 64 x BN each by wgmma, sums in registers.  `full` barriers tell the consumers that a stage has
// landed, `empty` ones tell the producer that all eight warps are done with it.  The two warpgroups do not wait for
// each other, so one may compute while the other stores its tile; the producer is up to a ring ahead, across the border
// between tiles.
//
// A stage: A first, then B, both cut into pieces of 64 x 64 elements, 8192 bytes (grouped_sm90.cuh has the swizzle):
//                     A                                             B
//   forward           K-major: one box [128 rows][64 k]             K-major: one box [BN features][64 k]
//   backward_input    K-major: one box [128 rows][64 k]             MN-major: BN/64 boxes [64 k][64 features]
//   backward_weight   MN-major: 2 boxes [64 rows][64 features]      MN-major: BN/64 boxes [64 rows][64 features]
// Warpgroup g's half of A begins 8192 g bytes from the stage's start in both layouts.
//
// What lies outside: TMA fills zeros outside a matrix.  Rows beyond the expert's last are loaded and hold anything (the
// next expert's rows, or NaN in spare rows).  As rows of A in forward and backward_input they only reach rows of D that
// are not stored.  In backward_weight they are part of the sum: the last step's are overwritten by zeros in both
// operands, since 0 * NaN is NaN.
#include <cuda.h>

#include <array>
#include <atomic>

#include "kernels/core/cuda.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/experts/grouped_sm90.cuh"
#include "kernels/experts/grouped_tiles.cuh"

namespace kestrel::cuda {
namespace {

// maybe_unused, here and below: only the sm_90a pass of the compiler sees the kernel's body.
[[maybe_unused]] constexpr int kDepth = 64;
constexpr int kTileM = 128, kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kPiece = 64 * 64 * 2, kBytesA = 2 * kPiece;
template <int BN>
constexpr int kStageBytes = kBytesA + BN / 64 * kPiece;
constexpr int kRing = 192 * 1024;
template <int BN>
constexpr int kStages = kRing / kStageBytes<BN>;  // 4 for BN = 256, 6 for BN = 128
constexpr int kShared = kRing + 1024;             // room to begin at a multiple of 1024

struct Output {
  void* d;
  int64_t ld;
};

// v[i] of lane 4q + j and v[j] of lane 4q + i change places: four lanes that hold a column each then hold a row each.
[[maybe_unused]] __device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? got : v[i], v[i + 1] = odd ? v[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
    v[i] = high ? got : v[i], v[i + 2] = high ? v[i + 2] : got;
  }
}

// This warp's 16 rows of sums, rounded, to d, which points to its first row's first column.  A thread stores 16 bytes,
// four threads 64 bytes of a row.  N is a multiple of 8, so a piece of 8 columns is inside or outside as a whole.
template <int sums>
__device__ __forceinline__ void store_rows(bf16_t* d, int64_t ld, const float (&sum)[sums], int64_t rows, int64_t cols,
                                           int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
#pragma unroll
    for (int j = 0; j < sums / 4; j += 4) {  // 8 columns each
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = pack_bf16(sum[4 * (j + i) + 2 * half], sum[4 * (j + i) + 2 * half + 1]);
      transpose_quad(v, lane);
      const int col = 8 * (j + lane % 4);
      if (row < rows && col < cols) *reinterpret_cast<uint4*>(d + row * ld + col) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

// The same, added to F32: nobody else writes this tile.  Eight loads are on their way at a time.
template <int sums>
__device__ __forceinline__ void add_rows(float* d, int64_t ld, const float (&sum)[sums], int64_t rows, int64_t cols,
                                         int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    float* const first = d + row * ld + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < sums / 4; j += 8) {
      float2 v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (row < rows && 8 * (j + i) < cols) v[i] = *reinterpret_cast<const float2*>(first + 8 * (j + i));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i].x += sum[4 * (j + i) + 2 * half];
        v[i].y += sum[4 * (j + i) + 2 * half + 1];
        if (row < rows && 8 * (j + i) < cols) *reinterpret_cast<float2*>(first + 8 * (j + i)) = v[i];
      }
    }
  }
}

// Rows [valid, 64) of every piece of a stage become zeros.  The swizzle moves 16-byte pieces within their row of 128
// bytes only, so these rows are the last (64 - valid) * 128 bytes of a piece.  All consumers call it.
template <int pieces>
__device__ __forceinline__ void zero_tail(uint32_t stage, int valid) {
  const int each = (64 - valid) * 8;  // stores of 16 bytes
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < pieces * each; i += kConsumers) {
    const uint32_t at = stage + static_cast<uint32_t>(i / each * kPiece + valid * 128 + i % each * 16);
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(at), "r"(0) : "memory");
  }
  shared_writes_before_wgmma();
  sync_some<1, kConsumers>();
}

// A place in the ring, and how often it has come round.
template <int stages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// 384 threads begin with 168 registers each.  Consumers need 128 for sums alone (BN = 256), so the producer's warpgroup
// gives most of its own away: 128 * 40 + 256 * 232 = 384 * 168.
[[maybe_unused]] constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <Grouped what, int BN>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_hopper_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                          const GroupedShape shape, const int64_t K, const Output out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool weight = what == Grouped::backward_weight;
  constexpr Major major_a = weight ? Major::mn : Major::k;
  constexpr Major major_b = what == Grouped::forward ? Major::k : Major::mn;
  constexpr int stages = kStages<BN>;
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) uint64_t full[stages], empty[stages];
  const uint32_t ring = (shared_address(raw) + 1023) & ~1023u;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // known to be uniform
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kConsumers / kWarp);
    }
    barrier_init_done();
  }
  __syncthreads();
  TileWalk<what, kTileM, BN> walk(shape);
  GroupedTile t;
  Place<stages> at;

  if (warp >= kConsumers / kWarp) {  // ---------------- the producer
    fewer_registers<kProducerRegisters>();
    if (warp > kConsumers / kWarp) return;  // a warpgroup changes its registers as a whole; one warp suffices
    if (lane == 0) {
      prefetch_map(&map_a);
      prefetch_map(&map_b);
    }
    while (walk.next(t)) {
      const int m0 = t.m * kTileM, n0 = t.n * BN;
      const int row = static_cast<int>(t.begin) + (weight ? 0 : m0);
      if constexpr (weight) {
        // dw will be read when the sums are complete; by then it is in L2.
        const int64_t cols = min(int64_t{BN}, shape.N - n0);
        const float* dw = static_cast<const float*>(out.d) + (t.expert * shape.M + m0) * out.ld + n0;
        for (int r = lane; r < kTileM && m0 + r < shape.M; r += kWarp) {
          prefetch_l2(dw + r * out.ld, static_cast<uint32_t>(cols) * 4);
        }
      }
      const int steps = static_cast<int>(((weight ? t.end - t.begin : K) + kDepth - 1) / kDepth);
      if (lane == 0) {
        for (int step = 0; step < steps; ++step) {
          const int k = step * kDepth;
          const uint32_t a = ring + static_cast<uint32_t>(at.stage * kStageBytes<BN>), b = a + kBytesA;
          uint64_t* const bar = &full[at.stage];
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          barrier_arrive_expecting(bar, kStageBytes<BN>);
          if constexpr (weight) {
#pragma unroll
            for (int j = 0; j < 2; ++j) load_box(a + j * kPiece, &map_a, bar, m0 + 64 * j, row + k);
#pragma unroll
            for (int j = 0; j < BN / 64; ++j) load_box(b + j * kPiece, &map_b, bar, n0 + 64 * j, row + k);
          } else {
            load_box(a, &map_a, bar, k, row);
            if constexpr (what == Grouped::forward) {
              load_box(b, &map_b, bar, k, n0, t.expert);
            } else {
#pragma unroll
              for (int j = 0; j < BN / 64; ++j) load_box(b + j * kPiece, &map_b, bar, n0 + 64 * j, k, t.expert);
            }
          }
          at.advance();
        }
      }
      __syncwarp();
    }
    return;
  }

  // ---------------- the consumers
  more_registers<kConsumerRegisters>();
  const int group = warp / 4;
  float sum[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) sum[i] = 0.f;
  while (walk.next(t)) {
    const int64_t depth = weight ? t.end - t.begin : K;
    const int steps = static_cast<int>((depth + kDepth - 1) / kDepth);
    int before = 0;  // the stage of the step before
    for (int step = 0; step < steps; ++step) {
      const uint32_t stage = ring + static_cast<uint32_t>(at.stage * kStageBytes<BN>);
      barrier_wait(&full[at.stage], at.parity);
      if constexpr (weight) {
        const int64_t valid = depth - int64_t{step} * kDepth;
        if (valid < kDepth) zero_tail<kStageBytes<BN> / kPiece>(stage, static_cast<int>(valid));
      }
      const uint64_t a = operand<major_a>(stage + group * kPiece), b = operand<major_b>(stage + kBytesA);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        wgmma<major_a == Major::mn, major_b == Major::mn>(sum, a + k * kNextDepth<major_a>, b + k * kNextDepth<major_b>,
                                                          step > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the step before has been read
      if (step > 0 && lane == 0) barrier_arrive(&empty[before]);
      before = at.stage;
      at.advance();
    }
    wgmma_wait<0>();
    wgmma_results(sum);
    if (lane == 0) barrier_arrive(&empty[before]);

    const int64_t m = int64_t{t.m} * kTileM + warp * 16, n = int64_t{t.n} * BN;  // this warp's first row and column
    if constexpr (weight) {
      float* d = static_cast<float*>(out.d) + (t.expert * shape.M + m) * out.ld + n;
      add_rows(d, out.ld, sum, shape.M - m, shape.N - n, lane);
    } else {
      bf16_t* d = static_cast<bf16_t*>(out.d) + (t.begin + m) * out.ld + n;
      store_rows(d, out.ld, sum, t.end - t.begin - m, shape.N - n, lane);
    }
  }
#else
  __trap();  // not launched: has_code
#endif
}

// ---------------------------------------------------------------- host

// The driver's function, found at run time: the program must start without a driver.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode find_encode() {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
}
Encode encode() {
  static const Encode f = find_encode();
  return f;
}

// A BF16 tensor of `rank` dimensions, dense one first, read in boxes of 64 dense elements by `height`.
CUtensorMap tensor_map(const void* data, cuuint32_t rank, std::array<int64_t, 3> extent, std::array<int64_t, 2> stride,
                       int height) {
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(extent[0]), static_cast<cuuint64_t>(extent[1]),
                              static_cast<cuuint64_t>(extent[2])};
  const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(stride[0]) * 2, static_cast<cuuint64_t>(stride[1]) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(height), 1}, every[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult error = encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), size, bytes,
                                  box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw DeviceError(text("cuTensorMapEncodeTiled refused BF16[", extent[2], ",", extent[1], ",", extent[0],
                           "], strides ", stride[1], " ", stride[0], ", box ", height, " x 64: CUresult ",
                           static_cast<int>(error), ". Please report it with the config."));
  }
  return map;
}
CUtensorMap map_rows(const void* data, int64_t rows, int64_t cols, int64_t ld, int height) {
  return tensor_map(data, 2, {cols, rows, 1}, {ld, 0}, height);
}
CUtensorMap map_experts(const void* data, int64_t experts, int64_t rows, int64_t cols, int height) {
  return tensor_map(data, 3, {cols, rows, experts}, {cols, rows * cols}, height);
}

// The current device is of capability 9.0 and this build holds sm_90a code for it.
bool has_code() {
  enum : int { unknown, no, yes };
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  std::atomic<int>& slot = known[static_cast<size_t>(device) % known.size()];
  int answer = slot.load(std::memory_order_relaxed);
  if (answer == unknown) {
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    answer = no;
    if (major == 9 && minor == 0) {
      cudaFuncAttributes attributes{};
      CUDA_CHECK(cudaFuncGetAttributes(&attributes, grouped_hopper_kernel<Grouped::forward, 256>));
      if (attributes.numRegs > 64) answer = yes;  // the empty body of another pass needs a handful
    }
    slot.store(answer, std::memory_order_relaxed);
  }
  return answer == yes;
}

template <Grouped what, int BN>
void launch(cudaStream_t stream, const GroupedProblem& p) {
  CUtensorMap a, b;
  if constexpr (what == Grouped::backward_weight) {
    a = map_rows(p.a, p.room(), p.M, p.lda, 64);
    b = map_rows(p.b, p.room(), p.N, p.ldb, 64);
  } else {
    a = map_rows(p.a, p.room(), p.K, p.lda, kTileM);
    b = what == Grouped::forward ? map_experts(p.b, p.experts, p.N, p.K, BN)
                                 : map_experts(p.b, p.experts, p.K, p.N, 64);
  }
  const auto kernel = grouped_hopper_kernel<what, BN>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  kernel<<<grouped_grid(p, kTileM, BN, 1), kThreads, kShared, stream>>>(a, b, shape_of(p), p.K, Output{p.d, p.ldd});
  CUDA_CHECK(cudaGetLastError());
}

template <Grouped what>
void launch(cudaStream_t stream, const GroupedProblem& p, GroupedPath path) {
  // Wide tiles read A and B least; narrow ones where wide ones would be mostly outside, or too few to go round.
  constexpr int64_t kEnough = 128;
  const bool suits = (p.N % 256 == 0 || p.N >= 1024) && most_tiles(p, kTileM, 256) >= kEnough;
  const bool wide = path == GroupedPath::hopper_256 || (path == GroupedPath::automatic && suits);
  wide ? launch<what, 256>(stream, p) : launch<what, 128>(stream, p);
}

}  // namespace

bool grouped_hopper_serves(const GroupedProblem& p) {
  const auto sixteen = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  // A width is a TMA extent and, for w, a stride: whole 16 bytes.  Below 64 most of a box would be outside.
  const auto width = [](int64_t n) { return n % 8 == 0 && n >= 64 && n < int64_t{1} << 31; };
  const bool weight = p.what == Grouped::backward_weight;
  return p.dtype == DType::bf16 && width(p.N) && width(weight ? p.M : p.K) && p.lda % 8 == 0 && p.ldb % 8 == 0 &&
         p.ldd % 8 == 0 && sixteen(p.a) && sixteen(p.b) && sixteen(p.d) && p.room() < int64_t{1} << 30 &&
         p.experts < int64_t{1} << 30 && has_code() && encode() != nullptr;
}

void grouped_hopper(Stream& s, const GroupedProblem& p, GroupedPath path) {
  with_product(p.what, [&](auto what) { launch<what()>(cuda_stream(s), p, path); });
}

}  // namespace kestrel::cuda
