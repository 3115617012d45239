#include "kernels/kda/kda_cpu.h"

#include <algorithm>

#include "kernels/core/parallel.h"
#include "kernels/kda/kda_chunk.h"

namespace kestrel::cpu {
namespace {

using namespace kda;

// Chains are dealt to at most this many workers, each with scratch of its own: worker w takes chains w, w + workers,
// ...
constexpr int64_t kMostWorkers = 64;

int64_t workers(const KdaDims& d) {
  return std::min(d.B * d.H, kMostWorkers);
}

template <class F>
void for_each_chain(const KdaDims& d, F&& fn) {
  parallel_for(workers(d), [&](int64_t worker) {
    for (int64_t c = worker; c < d.B * d.H; c += workers(d)) fn(worker, c);
  });
}

int64_t saved_per_chain(const KdaDims& d) {
  return (d.T - 1) / kChunk * d.K * d.V;
}

// What is kept: the state at the entry of every chunk but the first of its document.  Two such chunks of a chain begin
// at least 64 tokens apart (the chunk before one is whole), none before token 64: slot begin / 64 - 1 is its own.
int64_t saved_offset(const KdaDims& d, Span span) {
  return (span.begin / kChunk - 1) * d.K * d.V;
}

// The state that enters a chunk, from what the inputs and forward left.
void load_entry_state(const KdaDims& d, const ChainInputs& in, Span span, const float* saved, ChunkWork& w) {
  if (span.begin == 0) {
    load_state(d, w, w.state, in.initial_state);
  } else if (restarts(in, span.begin)) {
    load_state(d, w, w.state, nullptr);
  } else {
    load_state(d, w, w.state, saved + saved_offset(d, span));
  }
}

void forward_chain(const KdaDims& d, const ChainInputs& in, ChunkWork& w, Rows o, float* final_state, float* saved) {
  load_state(d, w, w.state, in.initial_state);
  for (int64_t t = 0; t < d.T;) {
    const Span span = chunk_from(in, t, d.T);
    if (restarts(in, t)) {
      load_state(d, w, w.state, nullptr);
    } else if (saved != nullptr && t > 0) {
      store_state(d, w, w.state, saved + saved_offset(d, span));
    }
    chunk_errors(d, in, span, kChunk, w);
    chunk_outputs(d, span, w, o);
    chunk_advance(span, w);
    t = span.end;
  }
  if (final_state != nullptr) store_state(d, w, w.state, final_state);
}

void backward_chain(const KdaDims& d, const ChainInputs& in, ChunkWork& w, const float* saved, Rows d_o,
                    const float* d_final_state, const ChainGrads& g) {
  std::fill(g.d_dt_bias, g.d_dt_bias + d.K, 0.f);
  *g.d_A_log = 0.f;
  load_state(d, w, w.d_state, d_final_state);
  for (int64_t end = d.T; end > 0;) {
    const Span span = chunk_before(in, end);
    load_entry_state(d, in, span, saved, w);
    chunk_errors(d, in, span, -kChunk, w);
    chunk_backward(d, in, span, w, d_o, g);
    if (restarts(in, span.begin)) load_state(d, w, w.d_state, nullptr);
    end = span.begin;
  }
  if (g.d_initial_state != nullptr) store_state(d, w, w.d_state, g.d_initial_state);
}

}  // namespace

int64_t kda_forward_scratch(const KdaDims& d) {
  return workers(d) * chunk_work_elements(d, false);
}

int64_t kda_backward_scratch(const KdaDims& d) {
  return workers(d) * chunk_work_elements(d, true) + d.B * d.H * (d.K + 1);
}

void kda_forward(const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved, float* scratch) {
  const int64_t per_worker = chunk_work_elements(d, false);
  for_each_chain(d, [&](int64_t worker, int64_t c) {
    ChunkWork w = chunk_work(d, false, scratch + worker * per_worker);
    forward_chain(d, chain_inputs(d, in, c), w, chain_rows(d, o, c, d.V), chain_state(d, final_state, c),
                  saved ? saved.f32() + c * saved_per_chain(d) : nullptr);
  });
}

void kda_backward(const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads, float* scratch) {
  const int64_t per_worker = chunk_work_elements(d, true);
  float* d_dt_bias = scratch + workers(d) * per_worker;
  float* d_A_log = d_dt_bias + d.B * d.H * d.K;
  for_each_chain(d, [&](int64_t worker, int64_t c) {
    ChunkWork w = chunk_work(d, true, scratch + worker * per_worker);
    backward_chain(d, chain_inputs(d, in, c), w, saved ? saved.f32() + c * saved_per_chain(d) : nullptr,
                   chain_rows(d, d_o, c, d.V), chain_state(d, d_final_state, c),
                   chain_grads(d, grads, c, d_dt_bias, d_A_log));
  });
  add_parameter_grads(d, grads, d_dt_bias, d_A_log);
}

}  // namespace kestrel::cpu

namespace kestrel {

int64_t kda_saved_elements(const KdaDims& d) {
  return d.B * d.H * cpu::saved_per_chain(d);
}

}  // namespace kestrel
