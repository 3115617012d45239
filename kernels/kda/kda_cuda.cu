// Which form runs, its scratch, and the order of its kernels.
#include "kernels/kda/kda_chunk.cuh"
#include "kernels/kda/kda_cuda.h"
#include "kernels/kda/kda_recurrence.cuh"

namespace kestrel::cuda {
namespace {

using namespace kda;

// Fewer tokens than this do not fill a tile; without gradients the recurrence is then the shorter way (decoding).
constexpr int64_t kShortest = 8;

bool aligned(const Tensor& t) {
  return t.dtype == DType::bf16 && wide(t, 8);
}

bool chunked(const KdaDims& d, const KdaInputs& in) {
  return d.K == d.V && (d.K == 64 || d.K == 128) && in.lower_bound.has_value() && aligned(in.q) && aligned(in.k) &&
         aligned(in.v) && aligned(in.gate);
}

Tokens tokens_of(const KdaDims& d, const KdaInputs& in) {
  const auto data = [](const Tensor& t) { return static_cast<const bf16_t*>(data_of<bf16_t>(t)); };
  return {d.T,
          d.H,
          divide_up(d.T, kChunk),
          data(in.q),
          data(in.k),
          data(in.v),
          data(in.gate),
          data(in.beta),
          in.q.ld,
          in.k.ld,
          in.v.ld,
          in.gate.ld,
          in.beta.ld,
          in.A_log.f32(),
          in.dt_bias.f32(),
          in.document_start ? in.document_start.i32() : nullptr,
          in.lower_bound.value_or(0.f)};
}

float* optional_f32(const Tensor& t) {
  return t ? t.f32() : nullptr;
}
bf16_t* states_of(const Tensor& saved) {
  return saved ? reinterpret_cast<bf16_t*>(saved.f32()) : nullptr;
}

// Scratch for the chunks of all chains: 64 (3 K + 128) + 2 K + 128 elements of 16 bits each.
Prepared take_prepared(Stream& s, const KdaDims& d) {
  const int64_t chunks = d.B * d.H * divide_up(d.T, kChunk), rows = chunks * kChunk;
  const auto take = [&](int64_t n, DType t) { return s.temp({n}, t).data; };
  Prepared p;
  p.k_in = static_cast<bf16_t*>(take(rows * d.K, DType::bf16));
  p.q_in = static_cast<bf16_t*>(take(rows * d.K, DType::bf16));
  p.k_out = static_cast<bf16_t*>(take(rows * d.K, DType::bf16));
  p.solve = static_cast<__half*>(take(rows * kChunk, DType::f16));
  p.scores = static_cast<bf16_t*>(take(rows * kChunk, DType::bf16));
  p.decay = static_cast<float*>(take(chunks * d.K, DType::f32));
  p.beta = static_cast<float*>(take(rows, DType::f32));
  return p;
}

void chunked_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved) {
  const Prepared ready = take_prepared(s, d);
  if (s.planning()) return;
  const Tokens tokens = tokens_of(d, in);
  const int K = static_cast<int>(d.K);
  prepare(cuda_stream(s), K, d.B * d.H, tokens, ready);
  scan(cuda_stream(s), K, d.B * d.H, tokens, ready,
       {data_of<bf16_t>(o), o.ld, optional_f32(in.initial_state), optional_f32(final_state), states_of(saved)});
}

void chunked_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                      const KdaGrads& g) {
  const int64_t chains = d.B * d.H, chunks = divide_up(d.T, kChunk);
  const Prepared ready = take_prepared(s, d);
  const Tensor d_states = s.temp({chains * chunks * d.K * d.V}, DType::bf16);
  const Tensor d_bias = s.temp({chains * chunks * d.K}), d_A_log = s.temp({chains * chunks});
  if (s.planning()) return;
  const Tokens tokens = tokens_of(d, in);
  const cudaStream_t stream = cuda_stream(s);
  const int K = static_cast<int>(d.K);
  const auto data = [](const Tensor& t) { return data_of<bf16_t>(t); };
  prepare(stream, K, chains, tokens, ready);
  scan_backward(stream, K, chains, tokens, ready,
                {data(d_o), data(g.dv), d_o.ld, g.dv.ld, optional_f32(d_final_state), optional_f32(g.d_initial_state),
                 data(d_states)});
  local_backward(
      stream, K, chains, tokens, ready,
      {data(d_o), data(g.dv), states_of(saved), data(d_states), data(g.dq), data(g.dk), data(g.dgate), data(g.dbeta),
       d_o.ld, g.dv.ld, g.dq.ld, g.dk.ld, g.dgate.ld, g.dbeta.ld, d_bias.f32(), d_A_log.f32()});
  add_parameter_grads(stream, d, chunks, d_bias.f32(), d_A_log.f32(), g.ddt_bias.f32(), g.dA_log.f32());
}

void check_widths(const KdaDims& d) {
  KESTREL_CHECK(d.K <= kRecurrenceWidest && d.V <= kRecurrenceWidest, "KDA on CUDA takes K and V up to ",
                kRecurrenceWidest, ", got K=", d.K, " V=", d.V);
}

}  // namespace

int64_t kda_saved_elements(const KdaDims& d, DType activations) {
  return divide_up(d.B * d.H * divide_up(d.T, kChunk) * d.K * d.V * size_of(activations), size_of(DType::f32));
}

void kda_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved) {
  check_widths(d);
  if (chunked(d, in) && aligned(o) && (saved || d.T >= kShortest)) {
    chunked_forward(s, d, in, o, final_state, saved);
  } else {
    recurrence_forward(s, d, in, o, final_state, saved);
  }
}

void kda_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& g) {
  check_widths(d);
  if (chunked(d, in) && aligned(d_o) && aligned(g.dq) && aligned(g.dk) && aligned(g.dv) && aligned(g.dgate)) {
    chunked_backward(s, d, in, saved, d_o, d_final_state, g);
  } else {
    recurrence_backward(s, d, in, saved, d_o, d_final_state, g);
  }
}

}  // namespace kestrel::cuda
