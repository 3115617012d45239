// Statistics for the biases, and the biases from them: integer counts, sums over experts in fp64 and in order.
#include "kernels/router/router.cuh"
#include "kernels/router/router_cuda.h"

namespace kestrel::cuda {
namespace {

// ---------------------------------------------------------------- histograms

// A block counts for 8 experts, a sector of every row, 128 rows at a time and 4 such steps in flight.  Its bins lie in
// shared memory where they fit, and are added to the global ones once.
constexpr int kExperts = 8, kHistogramRows = 128, kInFlight = 4;
constexpr int64_t kMostSharedBins = (96 << 10) / (kExperts * sizeof(int32_t));
constexpr size_t kPlainShared = 40 << 10;  // dynamic shared memory that needs no permission, besides the static

// Smallest and largest bias, by one warp; all lanes get them.  As the CPU's min and max: a NaN counts when it is the
// first, and then it stays.
__device__ __forceinline__ void bias_range(const float* bias, int E, int lane, float& low, float& high) {
  low = high = bias[0];
  for (int e = lane; e < E; e += kWarp) {
    const float b = bias[e];
    low = b < low ? b : low;
    high = high < b ? b : high;
  }
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float l = __shfl_xor_sync(kAllLanes, low, mask), h = __shfl_xor_sync(kAllLanes, high, mask);
    low = l < low ? l : low;
    high = high < h ? h : high;
  }
}

// quantile: position ((alpha - s) - lo) per_unit.   Otherwise: s bins.
template <bool quantile>
__global__ void __launch_bounds__(kExperts* kHistogramRows)
    histogram_kernel(int32_t* hist, int64_t hist_ld, const float* logits, int64_t logits_ld, const float* cutoff,
                     const float* bias, const uint8_t* valid, int64_t N, int E, int bins, bool in_shared) {
  extern __shared__ int32_t shared[];  // [kExperts, bins]
  const int thread = threadIdx.y * kExperts + threadIdx.x;
  const int e = blockIdx.x * kExperts + threadIdx.x;
  if (in_shared) {
    for (int i = thread; i < kExperts * bins; i += kExperts * kHistogramRows) shared[i] = 0;
  }
  float lo = 0.f, per_unit = 0.f;
  if constexpr (quantile) {
    __shared__ float range[2];
    if (thread < kWarp) {
      float low, high;
      bias_range(bias, E, thread, low, high);
      if (thread == 0) range[0] = low, range[1] = high;
    }
    __syncthreads();
    lo = range[0] - 1.f;
    per_unit = static_cast<float>(bins) / (range[1] - range[0] + 2.f);
  }
  __syncthreads();
  const float last = static_cast<float>(bins - 1);
  if (e < E) {
    int32_t* const mine = in_shared ? shared + threadIdx.x * bins : hist + e * hist_ld;
    const int64_t step = int64_t{gridDim.y} * kHistogramRows;
    for (int64_t n = int64_t{blockIdx.y} * kHistogramRows + threadIdx.y; n < N; n += kInFlight * step) {
      float z[kInFlight], alpha[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t m = n + u * step;
        const bool counted = m < N && (valid == nullptr || valid[m] != 0);
        z[u] = counted ? logits[m * logits_ld + e] : __int_as_float(0x7fc00000);
        alpha[u] = quantile && counted ? cutoff[m] : 0.f;
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const float s = router_score(z[u]);
        const float x = quantile ? ((alpha[u] - s) - lo) * per_unit : s * static_cast<float>(bins);
        if (x != x) continue;
        const float low = x > 0.f ? x : 0.f;
        atomicAdd(mine + static_cast<int>(low < last ? low : last), 1);
      }
    }
  }
  if (!in_shared) return;
  __syncthreads();
  for (int i = thread; i < kExperts * bins; i += kExperts * kHistogramRows) {
    const int expert = blockIdx.x * kExperts + i / bins;
    if (shared[i] > 0) atomicAdd(hist + expert * hist_ld + i % bins, shared[i]);
  }
}

template <bool quantile>
void launch_histogram(Stream& s, Tensor hist, Tensor logits, Tensor cutoff, Tensor bias, Tensor valid) {
  const int64_t N = logits.rows(), E = logits.cols(), bins = hist.cols();
  if (N == 0 || E == 0) return;
  const bool in_shared = bins <= kMostSharedBins;
  const int64_t groups = divide_up(E, kExperts);
  // About a block per multiprocessor: every further one costs another set of bins to clear and to add.
  int64_t parts = divide_up(multiprocessors(), groups);
  const int64_t most = divide_up(N, kInFlight * kHistogramRows);
  if (parts > most) parts = most;
  const size_t shared = in_shared ? static_cast<size_t>(kExperts * bins) * sizeof(int32_t) : 0;
  if (shared > kPlainShared) {
    CUDA_CHECK(cudaFuncSetAttribute(histogram_kernel<quantile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
  }
  histogram_kernel<quantile><<<dim3(static_cast<unsigned>(groups), static_cast<unsigned>(parts)),
                               dim3(kExperts, kHistogramRows), shared, cuda_stream(s)>>>(
      hist.i32(), hist.ld, logits.f32(), logits.ld, quantile ? cutoff.f32() : nullptr, quantile ? bias.f32() : nullptr,
      valid ? valid.as<uint8_t>() : nullptr, N, static_cast<int>(E), static_cast<int>(bins), in_shared);
  CUDA_CHECK(cudaGetLastError());
}

// ---------------------------------------------------------------- biases from histograms, a warp per expert

__device__ __forceinline__ int64_t total_of(const int32_t* count, int bins) {
  int64_t n = 0;
  for (int b = threadIdx.x; b < bins; b += kWarp) n += count[b];
  return warp_sum(n);
}

// Where the count reaches `target`, in bins from the first one on (or from the last one down): as the CPU does.
template <bool from_top>
__device__ __forceinline__ double position_of(const int32_t* count, int bins, double target) {
  const double needed = ceil(target);
  int64_t before = 0;
  for (int first = 0; first < bins; first += kWarp) {
    const int step = first + threadIdx.x, bin = from_top ? bins - 1 - step : step;
    const int64_t here = step < bins ? count[bin] : 0;
    const int64_t sum = warp_scan(here);
    const unsigned reached = __ballot_sync(kAllLanes, here > 0 && static_cast<double>(before + sum) >= needed);
    if (reached != 0) {
      const int lane = __ffs(reached) - 1;
      const int64_t h = __shfl_sync(kAllLanes, here, lane), upto = before + __shfl_sync(kAllLanes, sum, lane);
      double share = (target - static_cast<double>(upto - h)) / static_cast<double>(h);
      share = share < 0.0 ? 0.0 : (share > 1.0 ? 1.0 : share);
      const int b = first + lane;
      return from_top ? static_cast<double>(bins - b) - share : static_cast<double>(b) + share;
    }
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return from_top ? 0.0 : static_cast<double>(bins);
}

__device__ __forceinline__ double share_of(int64_t n, int64_t k, int64_t E) {
  return __dmul_rn(static_cast<double>(n), static_cast<double>(k)) / static_cast<double>(E);
}

__global__ void quantile_kernel(double* next, const float* bias, const int32_t* hist, int64_t hist_ld, int bins, int E,
                                int64_t k, float gain) {
  const int j = blockIdx.x;
  float low, high;
  bias_range(bias, E, threadIdx.x, low, high);
  const float lo = low - 1.f, per_unit = static_cast<float>(bins) / (high - low + 2.f);
  const int32_t* count = hist + j * hist_ld;
  const int64_t n = total_of(count, bins);
  double value = bias[j];
  if (n > 0) {
    const double at = position_of<false>(count, bins, share_of(n, k, E));
    const double b_hat = static_cast<double>(lo) + at / static_cast<double>(per_unit);
    value = __dadd_rn(value, __dmul_rn(static_cast<double>(gain), b_hat - value));
  }
  if (threadIdx.x == 0) next[j] = value;
}

__global__ void dynamic_kernel(float* bias, const int32_t* hist, int64_t hist_ld, int bins, int E, int64_t k,
                               float ema) {
  const int j = blockIdx.x;
  const int32_t* count = hist + j * hist_ld;
  const int64_t n = total_of(count, bins);
  if (n == 0) return;
  const double threshold = position_of<true>(count, bins, share_of(n, k, E)) / static_cast<double>(bins);
  const double old = static_cast<double>(ema);
  if (threadIdx.x == 0) {
    bias[j] = static_cast<float>(__dmul_rn(old, static_cast<double>(bias[j])) - __dmul_rn(1.0 - old, threshold));
  }
}

// bias[j] = value[j] - mean; the sum runs over j in order, so every rank finds the same bits.
__global__ void centre_kernel(float* bias, const double* value, int E) {
  constexpr int kStage = 1024;
  __shared__ double staged[kStage];
  __shared__ double mean;
  double sum = 0;
  for (int first = 0; first < E; first += kStage) {
    const int n = E - first < kStage ? E - first : kStage;
    for (int i = threadIdx.x; i < n; i += blockDim.x) staged[i] = value[first + i];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < n; ++i) sum += staged[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) mean = sum / static_cast<double>(E);
  __syncthreads();
  for (int j = threadIdx.x; j < E; j += blockDim.x) bias[j] = static_cast<float>(value[j] - mean);
}

void centre(Stream& s, Tensor bias, Tensor value) {
  centre_kernel<<<1, 256, 0, cuda_stream(s)>>>(bias.f32(), value.as<double>(), static_cast<int>(bias.numel()));
  CUDA_CHECK(cudaGetLastError());
}

// ---------------------------------------------------------------- exact order statistics

constexpr int kMarginRows = 8;  // of a block, a warp each

__global__ void margins_kernel(float* out, int64_t out_ld, const float* logits, int64_t logits_ld, const float* cutoff,
                               const uint8_t* valid, int64_t N, int E) {
  const int64_t n = int64_t{blockIdx.x} * kMarginRows + threadIdx.y;
  if (n >= N) return;
  const bool counted = valid == nullptr || valid[n] != 0;
  const float alpha = cutoff != nullptr ? cutoff[n] : 0.f;  // s - 0 is s
  for (int e = threadIdx.x; e < E; e += kWarp) {
    out[n * out_ld + e] = counted ? router_score(logits[n * logits_ld + e]) - alpha : __int_as_float(0x7fc00000);
  }
}

constexpr int kRows = 32;  // of a counting block, times 8 experts

// Radix selection on the order key, a byte per pass from the top: among the values of a column that share the bytes
// fixed so far (prefix), count the next byte.
__global__ void __launch_bounds__(kExperts* kRows)
    select_count_kernel(int32_t* counts, const uint32_t* prefix, const float* m, int64_t m_ld, int64_t N, int E,
                        int shift) {
  __shared__ int32_t shared[kExperts * 256];
  const int thread = threadIdx.y * kExperts + threadIdx.x, e = blockIdx.x * kExperts + threadIdx.x;
  for (int i = thread; i < kExperts * 256; i += kExperts * kRows) shared[i] = 0;
  __syncthreads();
  const uint32_t fixed = shift == 24 ? 0u : ~0u << (shift + 8);
  if (e < E) {
    const uint32_t wanted = shift == 24 ? 0u : prefix[e];
    for (int64_t n = int64_t{blockIdx.y} * kRows + threadIdx.y; n < N; n += int64_t{gridDim.y} * kRows) {
      const float x = m[n * m_ld + e];
      if (x != x) continue;
      const uint32_t key = static_cast<uint32_t>(order_key(x)) ^ 0x80000000u;
      if ((key & fixed) == wanted) atomicAdd(shared + threadIdx.x * 256 + (key >> shift & 255u), 1);
    }
  }
  __syncthreads();
  for (int i = thread; i < kExperts * 256; i += kExperts * kRows) {
    const int expert = blockIdx.x * kExperts + i / 256;
    if (expert < E && shared[i] > 0) atomicAdd(counts + expert * 256 + i % 256, shared[i]);
  }
}

// Fixes the byte at `shift` of a column, by one warp, and clears the counts for the next pass.  Lane l has the bytes
// 255 - 8 l down to 248 - 8 l.  rank < 0: no number in the column.
__global__ void select_narrow_kernel(int32_t* counts, uint32_t* prefix, int64_t* rank, float* b_hat, double* next,
                                     int64_t k, int E, int shift) {
  constexpr int kBytes = 256 / kWarp;
  const int e = blockIdx.x, lane = threadIdx.x;
  int32_t* const count = counts + int64_t{e} * 256;
  int64_t here[kBytes], mine = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    int32_t& c = count[255 - lane * kBytes - i];
    here[i] = c;
    c = 0;
    mine += here[i];
  }
  const int64_t upto = warp_scan(mine);
  const int64_t n = __shfl_sync(kAllLanes, upto, kWarp - 1);
  const int64_t wanted = shift == 24 ? (n > 0 ? n * k / E : -1) : rank[e];
  const uint32_t before = shift == 24 ? 0u : prefix[e];
  __syncwarp();  // rank and prefix are read before one lane writes them
  if (wanted < 0) {
    if (lane == 0) rank[e] = -1, prefix[e] = 0;
    if (shift == 0 && lane == 0) next[e] = static_cast<double>(b_hat[e]);
    return;
  }
  if (wanted >= upto || wanted < upto - mine) return;  // another lane has it
  int64_t left = wanted - (upto - mine);
  uint32_t byte = 0;
  bool open = true;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (open && left < here[i]) {
      byte = static_cast<uint32_t>(255 - lane * kBytes - i);
      open = false;
    }
    if (open) left -= here[i];
  }
  const uint32_t fixed = before | byte << shift;
  prefix[e] = fixed;
  rank[e] = left;
  if (shift != 0) return;
  b_hat[e] = -value_of_key(static_cast<int>(fixed ^ 0x80000000u));
  next[e] = static_cast<double>(b_hat[e]);
}

__global__ void sign_kernel(double* next, const float* bias, const int32_t* load, int E, float rate) {
  // Every thread sums all loads: E is small, and the sum is of integers.
  int64_t total = 0;
  for (int j = 0; j < E; ++j) total += load[j];
  for (int j = blockIdx.x * blockDim.x + threadIdx.x; j < E; j += gridDim.x * blockDim.x) {
    const int64_t missing = total - int64_t{load[j]} * E;  // E (mean - load), exact
    const double sign = missing > 0 ? 1.0 : (missing < 0 ? -1.0 : 0.0);
    next[j] = static_cast<double>(bias[j]) + static_cast<double>(rate) * sign;  // times -1, 0 or 1: exact
  }
}

}  // namespace

void quantile_histogram(Stream& s, Tensor hist, Tensor logits, Tensor cutoff, Tensor bias, Tensor valid) {
  launch_histogram<true>(s, hist, logits, cutoff, bias, valid);
}

void score_histogram(Stream& s, Tensor hist, Tensor logits, Tensor valid) {
  launch_histogram<false>(s, hist, logits, {}, {}, valid);
}

void quantile_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float gain, Tensor next) {
  const int E = static_cast<int>(bias.numel());
  quantile_kernel<<<static_cast<unsigned>(E), kWarp, 0, cuda_stream(s)>>>(
      next.as<double>(), bias.f32(), hist.i32(), hist.ld, static_cast<int>(hist.cols()), E, k, gain);
  CUDA_CHECK(cudaGetLastError());
  centre(s, bias, next);
}

void dynamic_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float ema) {
  const int E = static_cast<int>(bias.numel());
  dynamic_kernel<<<static_cast<unsigned>(E), kWarp, 0, cuda_stream(s)>>>(bias.f32(), hist.i32(), hist.ld,
                                                                         static_cast<int>(hist.cols()), E, k, ema);
  CUDA_CHECK(cudaGetLastError());
}

void margins(Stream& s, Tensor out, Tensor logits, Tensor cutoff, Tensor valid) {
  const int64_t N = logits.rows(), E = logits.cols();
  if (N == 0) return;
  margins_kernel<<<static_cast<unsigned>(divide_up(N, kMarginRows)), dim3(kWarp, kMarginRows), 0, cuda_stream(s)>>>(
      out.f32(), out.ld, logits.f32(), logits.ld, cutoff ? cutoff.f32() : nullptr,
      valid ? valid.as<uint8_t>() : nullptr, N, static_cast<int>(E));
  CUDA_CHECK(cudaGetLastError());
}

void exact_solve(Stream& s, Tensor b_hat, Tensor m, int64_t k, bool centred, const ExactScratch& x) {
  const int64_t N = m.rows();
  const int E = static_cast<int>(m.cols());
  const cudaStream_t stream = cuda_stream(s);
  uint32_t* prefix = reinterpret_cast<uint32_t*>(x.prefix.i32());
  CUDA_CHECK(cudaMemsetAsync(x.counts.data, 0, static_cast<size_t>(x.counts.bytes()), stream));
  const int64_t groups = divide_up(E, kExperts);
  int64_t parts = divide_up(int64_t{4} * multiprocessors(), groups);
  if (parts > divide_up(N, 4 * kRows)) parts = divide_up(N, 4 * kRows);
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (parts > 0) {
      select_count_kernel<<<dim3(static_cast<unsigned>(groups), static_cast<unsigned>(parts)), dim3(kExperts, kRows), 0,
                            stream>>>(x.counts.i32(), prefix, m.f32(), m.ld, N, E, shift);
      CUDA_CHECK(cudaGetLastError());
    }
    select_narrow_kernel<<<static_cast<unsigned>(E), kWarp, 0, stream>>>(x.counts.i32(), prefix, x.rank.as<int64_t>(),
                                                                         b_hat.f32(), x.next.as<double>(), k, E, shift);
    CUDA_CHECK(cudaGetLastError());
  }
  if (centred) centre(s, b_hat, x.next);
}

void sign_solve(Stream& s, Tensor bias, Tensor load, float rate, Tensor next) {
  const int E = static_cast<int>(bias.numel());
  sign_kernel<<<static_cast<unsigned>(divide_up(E, 128)), 128, 0, cuda_stream(s)>>>(next.as<double>(), bias.f32(),
                                                                                    load.i32(), E, rate);
  CUDA_CHECK(cudaGetLastError());
  centre(s, bias, next);
}

}  // namespace kestrel::cuda
