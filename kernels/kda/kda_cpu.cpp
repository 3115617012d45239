#include "kernels/kda/kda_cpu.h"

#include <algorithm>

#include "kernels/core/parallel.h"

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

// States at the entry of every segment but the first of its document: two such segments of a chain begin at least 64
// tokens apart (the one before is whole), none before token 64, so slot begin / 64 - 1 is a segment's own.
int64_t saved_states(const KdaDims& d) {
  return (d.T - 1) / kSegment * d.K * d.V;
}

int64_t saved_per_chain(const KdaDims& d) {
  return saved_states(d) + d.T * (d.V + 2 * kChunk);
}

Saved saved_of(const KdaDims& d, const Tensor& saved, int64_t c) {
  float* states = saved.f32() + c * saved_per_chain(d);
  float* e = states + saved_states(d);
  return {states, {e, d.V}, {e + d.T * d.V, 2 * kChunk}};
}

}  // namespace

const ChainForms& kda::best_chain_forms() {
  static const ChainForms best = chain_forms_avx512().forward != nullptr ? chain_forms_avx512() : chain_forms_base();
  return best;
}

int64_t kda_forward_scratch(const KdaDims& d) {
  return workers(d) * chunk_work_elements(d, false);
}

int64_t kda_backward_scratch(const KdaDims& d) {
  return workers(d) * chunk_work_elements(d, true) + d.B * d.H * (d.K + 1);
}

void kda_forward(const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved, float* scratch,
                 const ChainForms& forms) {
  const int64_t per_worker = chunk_work_elements(d, false);
  for_each_chain(d, [&](int64_t worker, int64_t c) {
    ChunkWork w = chunk_work(d, false, scratch + worker * per_worker);
    Saved keep{};
    if (saved) keep = saved_of(d, saved, c);
    forms.forward(d, chain_inputs(d, in, c), w, chain_rows(d, o, c, d.V), chain_state(d, final_state, c),
                  saved ? &keep : nullptr);
  });
}

void kda_backward(const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads, float* scratch, const ChainForms& forms) {
  const int64_t per_worker = chunk_work_elements(d, true);
  float* d_dt_bias = scratch + workers(d) * per_worker;
  float* d_A_log = d_dt_bias + d.B * d.H * d.K;
  for_each_chain(d, [&](int64_t worker, int64_t c) {
    ChunkWork w = chunk_work(d, true, scratch + worker * per_worker);
    forms.backward(d, chain_inputs(d, in, c), w, saved_of(d, saved, c), chain_rows(d, d_o, c, d.V),
                   chain_state(d, d_final_state, c), chain_grads(d, grads, c, d_dt_bias, d_A_log));
  });
  add_parameter_grads(d, grads, d_dt_bias, d_A_log);
}

}  // namespace kestrel::cpu

namespace kestrel {

int64_t kda_saved_elements(const KdaDims& d) {
  return d.B * d.H * cpu::saved_per_chain(d);
}

}  // namespace kestrel
