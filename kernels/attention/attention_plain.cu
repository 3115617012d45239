// Attention in fp32 without tensor cores: for F32 activations, in tests and fp32 runs.  B H T^2 (Dqk + Dv) FLOPs
// forward and 3.5 times that backward on the fp32 units, rows of k and v through L1 for each query: nothing here is
// fast.
//
// A warp takes a query (or, for dK and dV, a key) and 32 rows of the other kind at a time: first each lane has a row
// and forms its dot products, then each lane has channels lane, lane + 32, ... and sums over the 32 rows.
#include <limits>

#include "kernels/attention/head_rows.cuh"

namespace kestrel::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kSlots = static_cast<int>(kMostHeadChannels) / kWarp;  // channels of a lane

// Row i of `rows` to shared memory, by a warp.
__device__ __forceinline__ void load_row(float* to, const HeadRows<const float>& rows, int64_t i) {
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < rows.width; c += kWarp) to[c] = rows.row(i)[c];
  __syncwarp();
}
__device__ __forceinline__ float dot(const float* a, const float* b, int n) {
  float sum = 0.f;
  for (int c = 0; c < n; ++c) sum = fmaf(a[c], b[c], sum);
  return sum;
}
// sum[slot] += sum over the first `count` lanes of x_lane rows[first + lane][channel], lanes in order.
__device__ __forceinline__ void add_rows(float (&sum)[kSlots], float x, const HeadRows<const float>& rows,
                                         int64_t first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int j = 0; j < count; ++j) {
    const float weight = __shfl_sync(0xffffffffu, x, j);
    const float* row = rows.row(first + j);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int c = lane + slot * kWarp;
      if (c < rows.width) sum[slot] = fmaf(weight, row[c], sum[slot]);
    }
  }
}
__device__ __forceinline__ void store_row(const HeadRows<float>& rows, int64_t i, const float (&sum)[kSlots],
                                          float factor) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int c = lane + slot * kWarp;
    if (c < rows.width) rows.row(i)[c] = factor * sum[slot];
  }
}

// The warp's row of the B H T of the grid.
struct Task {
  int64_t head, b, h;
  int i;
  bool valid;
  __device__ Task(int64_t heads, int H, int T) {
    const int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    head = task / T, b = head / H, h = head % H, i = static_cast<int>(task % T), valid = head < heads;
  }
};

__global__ void __launch_bounds__(kThreads)
    forward_kernel(AttentionInput<float> in, HeadRows<float> o, float* lse, float* max_logit, int64_t heads) {
  __shared__ float shared[kWarps][kMostHeadChannels];
  const Task task(heads, in.H, in.T);
  if (!task.valid) return;  // whole warps; no barrier of the block follows
  const int lane = static_cast<int>(threadIdx.x) % kWarp, T = in.T, i = task.i;
  const HeadRows<const float> q = in.q.of(task.b, task.h, T), k = in.k.of(task.b, task.h, T),
                              v = in.v.of(task.b, task.h, T);
  float* query = shared[threadIdx.x / kWarp];
  load_row(query, q, i);
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.f, out[kSlots] = {};
  for (int j0 = in.start ? in.start[task.b * T + i] : 0; j0 <= i; j0 += kWarp) {
    const int count = min(kWarp, i - j0 + 1);
    const float s =
        lane < count ? in.scale * dot(query, k.row(j0 + lane), q.width) : -std::numeric_limits<float>::infinity();
    const float m = fmaxf(largest, warp_max(s)), p = expf(s - m), factor = expf(largest - m);
    largest = m;
    sum = fmaf(sum, factor, warp_sum(p));
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) out[slot] *= factor;
    add_rows(out, p, v, j0, count);
  }
  store_row(o.of(task.b, task.h, T), i, out, 1.f / sum);
  if (lane != 0) return;
  lse[task.head * T + i] = largest + logf(sum);
  if (max_logit) raise_to(max_logit + task.h, largest);
}

struct BackwardInput {
  HeadRows<const float> d_o;
  const float *delta, *lse;
};

__global__ void __launch_bounds__(kThreads)
    dq_kernel(AttentionInput<float> in, BackwardInput back, HeadRows<float> dq, int64_t heads) {
  __shared__ float shared[kWarps][2][kMostHeadChannels];
  const Task task(heads, in.H, in.T);
  if (!task.valid) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, T = in.T, i = task.i;
  const HeadRows<const float> q = in.q.of(task.b, task.h, T), k = in.k.of(task.b, task.h, T),
                              v = in.v.of(task.b, task.h, T), d_o = back.d_o.of(task.b, task.h, T);
  float *query = shared[threadIdx.x / kWarp][0], *d_out = shared[threadIdx.x / kWarp][1];
  load_row(query, q, i);
  load_row(d_out, d_o, i);
  const float lse = back.lse[task.head * T + i], delta = back.delta[task.head * T + i];
  float sum[kSlots] = {};
  for (int j0 = in.start ? in.start[task.b * T + i] : 0; j0 <= i; j0 += kWarp) {
    const int count = min(kWarp, i - j0 + 1);
    float ds = 0.f;
    if (lane < count) {
      const float p = expf(in.scale * dot(query, k.row(j0 + lane), q.width) - lse);
      ds = p * (dot(d_out, v.row(j0 + lane), v.width) - delta);
    }
    add_rows(sum, ds, k, j0, count);
  }
  store_row(dq.of(task.b, task.h, T), i, sum, in.scale);
}

__global__ void __launch_bounds__(kThreads)
    dkv_kernel(AttentionInput<float> in, BackwardInput back, HeadRows<float> dk, HeadRows<float> dv, int64_t heads) {
  __shared__ float shared[kWarps][2][kMostHeadChannels];
  const Task task(heads, in.H, in.T);
  if (!task.valid) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, T = in.T, j = task.i;
  const HeadRows<const float> q = in.q.of(task.b, task.h, T), k = in.k.of(task.b, task.h, T),
                              v = in.v.of(task.b, task.h, T), d_o = back.d_o.of(task.b, task.h, T);
  const int32_t* start = in.start ? in.start + task.b * T : nullptr;
  float *key = shared[threadIdx.x / kWarp][0], *value = shared[threadIdx.x / kWarp][1];
  load_row(key, k, j);
  load_row(value, v, j);
  float sum_k[kSlots] = {}, sum_v[kSlots] = {};
  for (int i0 = j; i0 < T; i0 += kWarp) {
    if (start && start[i0] > j) break;  // and so do all later queries
    const int count = min(kWarp, T - i0), i = i0 + lane;
    float p = 0.f, ds = 0.f;
    if (lane < count && (!start || start[i] <= j)) {
      p = expf(in.scale * dot(key, q.row(i), q.width) - back.lse[task.head * T + i]);
      ds = p * (dot(value, d_o.row(i), v.width) - back.delta[task.head * T + i]);
    }
    add_rows(sum_k, ds, q, i0, count);
    add_rows(sum_v, p, d_o, i0, count);
  }
  store_row(dk.of(task.b, task.h, T), j, sum_k, in.scale);
  store_row(dv.of(task.b, task.h, T), j, sum_v, 1.f);
}

void check_widths(const AttentionDims& d) {
  KESTREL_CHECK(d.Dqk <= kMostHeadChannels && d.Dv <= kMostHeadChannels, "attention heads of ", d.Dqk, " and ", d.Dv,
                " channels, at most ", kMostHeadChannels, " on CUDA");
}

}  // namespace

void attention_forward_plain(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                             Tensor document_start, Tensor max_logit) {
  check_widths(d);
  const int64_t heads = d.B * d.H;
  forward_kernel<<<grid_of(divide_up(heads * d.T, kWarps)), kThreads, 0, cuda_stream(s)>>>(
      AttentionInput<float>(d, q, k, v, document_start), HeadRows<float>(o, d.Dv), lse.f32(),
      max_logit ? max_logit.f32() : nullptr, heads);
  CUDA_CHECK(cudaGetLastError());
}

void attention_backward_plain(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                              Tensor delta, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start) {
  check_widths(d);
  const int64_t heads = d.B * d.H;
  const unsigned blocks = grid_of(divide_up(heads * d.T, kWarps));
  const cudaStream_t stream = cuda_stream(s);
  const AttentionInput<float> in(d, q, k, v, document_start);
  const BackwardInput back{HeadRows<const float>(d_o, d.Dv), delta.f32(), lse.f32()};
  dq_kernel<<<blocks, kThreads, 0, stream>>>(in, back, HeadRows<float>(dq, d.Dqk), heads);
  CUDA_CHECK(cudaGetLastError());
  dkv_kernel<<<blocks, kThreads, 0, stream>>>(in, back, HeadRows<float>(dk, d.Dqk), HeadRows<float>(dv, d.Dv), heads);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace kestrel::cuda
