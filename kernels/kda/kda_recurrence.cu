// The definition of KDA, token by token: the form that takes everything, in fp32 throughout.
//
// One block per chain and 32 value columns: a lane per column, a warp per eighth of the keys (k = warp + 8 i), the
// state [K,32] in registers.  Per token three barriers; bound by their latency, about 2 us a token, whatever the sizes.
// Backward goes through the chunks of 64 tokens in reverse: forward again from the saved state, keeping every token's
// state in scratch, then the adjoint.  What must be summed over the values (dq, dk, dg, dbeta) is left per group of 32
// and summed, group by group, by a second kernel, which also takes it through norms and gate.
#include <algorithm>

#include "kernels/kda/kda_chunk.cuh"
#include "kernels/kda/kda_launch.cuh"
#include "kernels/kda/kda_recurrence.cuh"

namespace kestrel::cuda::kda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32;                   // values of a block
constexpr int64_t kScratch = 256 << 20;        // bytes the backward pass aims at, by taking a few chains at a time
constexpr float kLowestLogDecay = -87.33654f;  // below it e^g is zero

template <class T>
struct Rows {
  T* p;
  int64_t ld;
  Rows() = default;
  explicit Rows(const Tensor& t) : p(t.empty() ? nullptr : data_of<T>(t)), ld(t.ld) {}
  __device__ T& at(int64_t row, int64_t column) const { return p[row * ld + column]; }
};

template <class T>
struct Chain {                      // inputs of all chains, and sizes
  int64_t tokens, H, K, V, chunks;  // tokens: of a row
  Rows<T> q, k, v, gate, beta;
  const float *A_log, *dt_bias;
  const int32_t* document_start;
  float bound;
  bool bounded;
  const float* initial_state;
  __device__ int64_t row(int64_t chain, int64_t t) const { return chain / H * tokens + t; }
  __device__ bool restarts(int64_t chain, int64_t t) const {
    return document_start != nullptr && t > 0 && document_start[row(chain, t)] == t;
  }
};

struct GateValue {
  float g, dg_dx, y, d_A_log;  // d_A_log: dg / dA_log
};
template <class T>
__device__ GateValue gate_value(const Chain<T>& in, int64_t chain, int64_t t, int64_t c) {
  const int64_t h = chain % in.H;
  const float rate = expf(fminf(in.A_log[h], 80.f));
  const float y = to_float(in.gate.at(in.row(chain, t), h * in.K + c)) + in.dt_bias[h * in.K + c];
  GateValue value;
  value.y = y;
  if (in.bounded) {
    const float z = rate * y, e = expf(-fabsf(z)), inverse = 1.f / (1.f + e);
    value.g = in.bound * (z < 0.f ? e : 1.f) * inverse;
    value.dg_dx = in.bound * (e * inverse * inverse) * rate;
    value.d_A_log = value.dg_dx * y;
  } else {
    const float e = expf(-fabsf(y));
    const float g = -rate * (fmaxf(y, 0.f) + log1pf(e));
    const bool alive = g > kLowestLogDecay;
    value.g = g;
    value.dg_dx = alive ? -rate * ((y < 0.f ? e : 1.f) / (1.f + e)) : 0.f;
    value.d_A_log = alive ? g : 0.f;
  }
  return value;
}

// A token's vectors in shared memory, and the pieces of sums over warps.
struct Shared {
  float q[kRecurrenceWidest], k[kRecurrenceWidest], decay[kRecurrenceWidest];
  float norms[2][kWarps];
  float sum[kWarps][kColumns], other[kWarps][kColumns];
};

// q, k (raw) and decays of token t, and what their norms are made of.  Needs a barrier before and after.
template <class T>
__device__ void load_token(const Chain<T>& in, int64_t chain, int64_t t, Shared& s) {
  const int64_t c = threadIdx.x, h = chain % in.H, row = in.row(chain, t);
  float q = 0.f, k = 0.f;
  if (c < in.K) {
    q = to_float(in.q.at(row, h * in.K + c));
    k = to_float(in.k.at(row, h * in.K + c));
    const float g = gate_value(in, chain, t, c).g;
    s.q[c] = q;
    s.k[c] = k;
    s.decay[c] = g > kLowestLogDecay ? expf(g) : 0.f;
  }
  q = warp_sum(q * q);
  k = warp_sum(k * k);
  if (c % 32 == 0) {
    s.norms[0][c / 32] = q;
    s.norms[1][c / 32] = k;
  }
}
__device__ float reciprocal_norm(const float (&parts)[kWarps]) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w];
  return 1.f / sqrtf(sum + 1e-6f);
}
__device__ float column_sum(const float (&parts)[kWarps][kColumns], int column) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w][column];
  return sum;
}

// This thread's part of a state [K,V] in memory, transposed or not.
template <int R>
struct Part {
  int64_t K, V, column;
  int warp;
  template <class T>
  __device__ Part(const Chain<T>& in, int64_t group)
      : K(in.K), V(in.V), column(group * kColumns + threadIdx.x % 32), warp(static_cast<int>(threadIdx.x) / 32) {}
  __device__ bool has(int i) const { return warp + i * kWarps < K && column < V; }
  __device__ int64_t key(int i) const { return warp + i * kWarps; }
  template <class E>
  __device__ void load(float (&S)[R], const E* state, bool transposed) const {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      S[i] = state != nullptr && has(i) ? to_float(state[transposed ? column * K + key(i) : key(i) * V + column]) : 0.f;
    }
  }
  template <class E>
  __device__ void store(const float (&S)[R], E* state, bool transposed) const {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      if (has(i)) state[transposed ? column * K + key(i) : key(i) * V + column] = from_float<E>(S[i]);
    }
  }
};

// One token forward: S <- diag(a) S, e = v - S^T k, u = beta e, S <- S + k u^T.  Returns e.  Two barriers inside, the
// first of which makes the token's vectors visible.
template <int R, class T>
__device__ float step(const Chain<T>& in, int64_t chain, int64_t t, const Part<R>& part, float (&S)[R], Shared& s,
                      float beta) {
  __syncthreads();
  const int lane = lane_id();
  const float k_scale = reciprocal_norm(s.norms[1]);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    if (part.key(i) >= part.K) break;
    S[i] *= s.decay[part.key(i)];
    sum += s.k[part.key(i)] * S[i];
  }
  s.sum[part.warp][lane] = sum * k_scale;
  __syncthreads();
  const float v = part.column < part.V ? to_float(in.v.at(in.row(chain, t), chain % in.H * in.V + part.column)) : 0.f;
  const float e = v - column_sum(s.sum, lane), u = beta * e * k_scale;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    if (part.key(i) >= part.K) break;
    S[i] += s.k[part.key(i)] * u;
  }
  return e;
}

template <class T>
__device__ float beta_of(const Chain<T>& in, int64_t chain, int64_t t) {
  return 1.f / (1.f + expf(-to_float(in.beta.at(in.row(chain, t), chain % in.H))));
}

template <int R, class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(Chain<T> in, Rows<T> o, float* final_state, T* saved) {
  __shared__ Shared s;
  const int64_t chain = blockIdx.x, size = in.K * in.V;
  const Part<R> part(in, blockIdx.y);
  const int lane = lane_id();
  float S[R];
  part.load(S, in.initial_state == nullptr ? nullptr : in.initial_state + chain * size, false);
  for (int64_t t = 0; t < in.tokens; ++t) {
    if (saved != nullptr && t % kChunk == 0) part.store(S, saved + (chain * in.chunks + t / kChunk) * size, true);
    if (in.restarts(chain, t)) part.load(S, static_cast<const float*>(nullptr), false);
    load_token(in, chain, t, s);
    step(in, chain, t, part, S, s, beta_of(in, chain, t));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      if (part.key(i) < part.K) sum += s.q[part.key(i)] * S[i];
    }
    s.other[part.warp][lane] = sum * reciprocal_norm(s.norms[0]);
    __syncthreads();
    if (part.warp == 0 && part.column < in.V) {
      const float scale = 1.f / sqrtf(static_cast<float>(in.K));
      o.at(in.row(chain, t), chain % in.H * in.V + part.column) = from_float<T>(scale * column_sum(s.other, lane));
    }
  }
  if (final_state != nullptr) part.store(S, final_state + chain * size, false);
}

// What the adjoint leaves per group of values: for every chain of the launch, group and token K numbers each, and one.
struct Shares {
  float *dq, *dk, *dg, *d_beta;
  int64_t chains, groups, T, K;  // chains of this launch
  __device__ int64_t at(int64_t chain, int64_t group, int64_t t) const { return (group * chains + chain) * T + t; }
};

struct BackwardState {
  const float* d_final_state;
  float* d_initial_state;
  float* history;  // per block: the state before each token of a chunk, [64][R][kThreads]
};

template <int R, class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(Chain<T> in, int64_t first_chain, Rows<T> d_o, Rows<T> dv,
                                                            const T* saved, BackwardState a, Shares shares) {
  __shared__ Shared s;
  __shared__ float errors[kChunk][kColumns];
  const int64_t chain = first_chain + blockIdx.x, group = blockIdx.y, size = in.K * in.V, h = chain % in.H;
  const Part<R> part(in, group);
  const int lane = lane_id();
  const float scale = 1.f / sqrtf(static_cast<float>(in.K));
  float* history = a.history + ((blockIdx.x * shares.groups + group) * kChunk * R) * kThreads + threadIdx.x;
  float D[R];
  part.load(D, a.d_final_state == nullptr ? nullptr : a.d_final_state + chain * size, false);
  for (int64_t chunk = in.chunks - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kChunk, end = begin + kChunk < in.tokens ? begin + kChunk : in.tokens;
    float S[R];
    part.load(S, saved + (chain * in.chunks + chunk) * size, true);
    for (int64_t t = begin; t < end; ++t) {
      if (in.restarts(chain, t)) part.load(S, static_cast<const float*>(nullptr), false);
#pragma unroll
      for (int i = 0; i < R; ++i) history[((t - begin) * R + i) * kThreads] = S[i];
      __syncthreads();  // the last token's vectors are read
      load_token(in, chain, t, s);
      const float e = step(in, chain, t, part, S, s, beta_of(in, chain, t));
      if (part.warp == 0) errors[t - begin][lane] = e;
    }
    for (int64_t t = end - 1; t >= begin; --t) {
      __syncthreads();  // the last token's vectors are read
      load_token(in, chain, t, s);
      __syncthreads();
      const float q_scale = reciprocal_norm(s.norms[0]) * scale, k_scale = reciprocal_norm(s.norms[1]);
      const float beta = beta_of(in, chain, t), e = errors[t - begin][lane], u = beta * e;
      const int64_t row = in.row(chain, t), share = shares.at(blockIdx.x, group, t);
      const float d_out = part.column < in.V ? to_float(d_o.at(row, h * in.V + part.column)) : 0.f;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < R; ++i) {
        if (part.key(i) >= part.K) break;
        const float k = s.k[part.key(i)] * k_scale;
        const float after = s.decay[part.key(i)] * history[((t - begin) * R + i) * kThreads] + k * u;
        const float dq = warp_sum(after * d_out);
        if (lane == 0) shares.dq[share * in.K + part.key(i)] = dq;
        D[i] += s.q[part.key(i)] * q_scale * d_out;
        sum += k * D[i];
      }
      s.sum[part.warp][lane] = sum;
      __syncthreads();
      const float d_u = column_sum(s.sum, lane), d_e = beta * d_u;
#pragma unroll
      for (int i = 0; i < R; ++i) {
        if (part.key(i) >= part.K) break;
        const float decay = s.decay[part.key(i)], before = history[((t - begin) * R + i) * kThreads];
        const float decayed = D[i] - s.k[part.key(i)] * k_scale * d_e;
        const float dk = warp_sum(D[i] * u - decay * before * d_e), dg = warp_sum(decayed * before) * decay;
        if (lane == 0) {
          shares.dk[share * in.K + part.key(i)] = dk;
          shares.dg[share * in.K + part.key(i)] = dg;
        }
        D[i] = decay * decayed;
      }
      if (part.warp == 0) {
        const float d_beta = warp_sum(d_u * e);
        if (lane == 0) shares.d_beta[share] = d_beta;
        if (part.column < in.V) dv.at(row, h * in.V + part.column) = from_float<T>(d_e);
      }
      if (in.restarts(chain, t)) part.load(D, static_cast<const float*>(nullptr), false);
    }
  }
  if (a.d_initial_state != nullptr) part.store(D, a.d_initial_state + chain * size, false);
}

template <class T>
struct RowGrads {
  Rows<T> dq, dk, dgate, dbeta;
  float *d_bias, *d_A_log;  // [chains, chunks, K], [chains, chunks]
};

// Sums the groups' shares; back through norms, gate and beta.  One block per chunk and chain, a warp per eighth of its
// tokens, lanes over channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(Chain<T> in, int64_t first_chain, Shares shares, RowGrads<T> out) {
  constexpr int kPerLane = static_cast<int>(kRecurrenceWidest) / 32;
  __shared__ float d_bias[kWarps][kRecurrenceWidest], d_A_log[kWarps];
  const int64_t local = blockIdx.x / in.chunks, chunk = blockIdx.x % in.chunks, chain = first_chain + local;
  const int64_t h = chain % in.H, K = in.K;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_id();
  const float scale = 1.f / sqrtf(static_cast<float>(K));
  float bias[kPerLane] = {}, A_log = 0.f;
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const int64_t t = chunk * kChunk + warp * (kChunk / kWarps) + i, row = in.row(chain, t);
    if (t >= in.tokens) break;
    float x[2][kPerLane], dy[2][kPerLane], norm[2] = {}, dot[2] = {};
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int64_t c = n * 32 + lane;
      x[0][n] = x[1][n] = dy[0][n] = dy[1][n] = 0.f;
      if (c >= K) continue;
      x[0][n] = to_float(in.q.at(row, h * K + c));
      x[1][n] = to_float(in.k.at(row, h * K + c));
      float dg = 0.f;
      for (int64_t group = 0; group < shares.groups; ++group) {
        const int64_t at = shares.at(local, group, t) * K + c;
        dy[0][n] += shares.dq[at];
        dy[1][n] += shares.dk[at];
        dg += shares.dg[at];
      }
      const GateValue gate = gate_value(in, chain, t, c);
      const float dx = dg * gate.dg_dx;
      out.dgate.at(row, h * K + c) = from_float<T>(dx);
      bias[n] += dx;
      A_log += dg * gate.d_A_log;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        norm[which] += x[which][n] * x[which][n];
        dot[which] += x[which][n] * dy[which][n];
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float r = 1.f / sqrtf(warp_sum(norm[which]) + 1e-6f), along = warp_sum(dot[which]) * r * r;
      const float factor = which == 0 ? r * scale : r;
      const Rows<T>& dx = which == 0 ? out.dq : out.dk;
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) {
        const int64_t c = n * 32 + lane;
        if (c < K) dx.at(row, h * K + c) = from_float<T>(factor * (dy[which][n] - x[which][n] * along));
      }
    }
    if (lane == 0) {
      float d_beta = 0.f;
      for (int64_t group = 0; group < shares.groups; ++group) d_beta += shares.d_beta[shares.at(local, group, t)];
      const float e = expf(-fabsf(to_float(in.beta.at(row, h)))), inverse = 1.f / (1.f + e);
      out.dbeta.at(row, h) = from_float<T>(d_beta * e * inverse * inverse);
    }
  }
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) d_bias[warp][n * 32 + lane] = bias[n];
  A_log = block_sum<kThreads>(A_log, d_A_log);  // and a barrier
  const int64_t index = chain * in.chunks + chunk, c = threadIdx.x;
  if (c == 0) out.d_A_log[index] = A_log;
  if (c >= K) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += d_bias[w][c];
  out.d_bias[index * K + c] = sum;
}

// ---------------------------------------------------------------- host

template <class T>
Chain<T> chain_of(const KdaDims& d, const KdaInputs& in) {
  Chain<T> c;
  c.tokens = d.T, c.H = d.H, c.K = d.K, c.V = d.V, c.chunks = divide_up(d.T, kChunk);
  c.q = Rows<T>(in.q), c.k = Rows<T>(in.k), c.v = Rows<T>(in.v), c.gate = Rows<T>(in.gate), c.beta = Rows<T>(in.beta);
  c.A_log = in.A_log.f32(), c.dt_bias = in.dt_bias.f32();
  c.document_start = in.document_start ? in.document_start.i32() : nullptr;
  c.bounded = in.lower_bound.has_value();
  c.bound = in.lower_bound.value_or(0.f);
  c.initial_state = in.initial_state ? in.initial_state.f32() : nullptr;
  return c;
}

// f(R): keys per warp as a constant.
template <class F>
void with_keys(int64_t K, F&& f) {
  if (K <= 64) return f(std::integral_constant<int, 8>{});
  if (K <= 128) return f(std::integral_constant<int, 16>{});
  f(std::integral_constant<int, 32>{});
}
int64_t keys_per_warp(int64_t K) {
  int64_t keys = 0;
  with_keys(K, [&](auto R) { keys = R(); });
  return keys;
}

float* optional_f32(const Tensor& t) {
  return t ? t.f32() : nullptr;
}
template <class T>
T* optional_saved(const Tensor& t) {  // the F32 tensor `saved` as what it holds
  return t ? reinterpret_cast<T*>(t.f32()) : nullptr;
}

}  // namespace

void recurrence_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved) {
  if (s.planning()) return;
  const dim3 blocks(static_cast<unsigned>(d.B * d.H), static_cast<unsigned>(divide_up(d.V, kColumns)));
  with_activation(in.q.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    with_keys(d.K, [&](auto R) {
      launch(forward_kernel<R(), T>, blocks, kThreads, 0, cuda_stream(s), chain_of<T>(d, in), Rows<T>(o),
             optional_f32(final_state), optional_saved<T>(saved));
    });
  });
}

void recurrence_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o,
                         Tensor d_final_state, const KdaGrads& grads) {
  const int64_t chains = d.B * d.H, groups = divide_up(d.V, kColumns), chunks = divide_up(d.T, kChunk);
  const int64_t history = groups * kChunk * keys_per_warp(d.K) * kThreads, share = groups * d.T * (3 * d.K + 1);
  const int64_t at_once = std::clamp<int64_t>(kScratch / 4 / (history + share), 1, chains);
  const Tensor d_bias = s.temp({chains * chunks * d.K}), d_A_log = s.temp({chains * chunks});
  const Tensor histories = s.temp({at_once * history}), shared = s.temp({at_once * share});
  if (s.planning()) return;
  const cudaStream_t stream = cuda_stream(s);
  for (int64_t first = 0; first < chains; first += at_once) {
    const int64_t n = std::min(at_once, chains - first), rows = groups * n * d.T;
    float* p = shared.f32();
    const Shares shares{p, p + rows * d.K, p + 2 * rows * d.K, p + 3 * rows * d.K, n, groups, d.T, d.K};
    const BackwardState state{optional_f32(d_final_state), optional_f32(grads.d_initial_state), histories.f32()};
    with_activation(in.q.dtype, [&](auto element) {
      using T = typename decltype(element)::type;
      const Chain<T> chain = chain_of<T>(d, in);
      with_keys(d.K, [&](auto R) {
        launch(backward_kernel<R(), T>, dim3(static_cast<unsigned>(n), static_cast<unsigned>(groups)), kThreads, 0,
               stream, chain, first, Rows<T>(d_o), Rows<T>(grads.dv), optional_saved<T>(saved), state, shares);
      });
      launch(finish_kernel<T>, dim3(static_cast<unsigned>(n * chunks)), kThreads, 0, stream, chain, first, shares,
             RowGrads<T>{Rows<T>(grads.dq), Rows<T>(grads.dk), Rows<T>(grads.dgate), Rows<T>(grads.dbeta), d_bias.f32(),
                         d_A_log.f32()});
    });
  }
  add_parameter_grads(stream, d, chunks, d_bias.f32(), d_A_log.f32(), grads.ddt_bias.f32(), grads.dA_log.f32());
}

}  // namespace kestrel::cuda::kda
