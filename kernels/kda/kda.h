// Kimi Delta Attention: a gated delta rule with one decay per key channel.
//
// Per batch row and head, state S [K,V] (fp32), token by token:
//   q <- q / |q|,  k <- k / |k|          with |x| = (sum x^2 + 1e-6)^(1/2)
//   beta = sigmoid(beta_logit)
//   g = lower_bound * sigmoid(exp(A_log) (gate + dt_bias))      (lower_bound < 0: log decay in (lower_bound, 0))
//   g = -exp(A_log) softplus(gate + dt_bias)                    (no lower_bound)
//   S <- diag(e^g) S;   e = v - S^T k;   S <- S + beta k e^T;   o = K^(-1/2) S^T q
// The state starts from `initial_state` (or zero) at t = 0 and from zero wherever document_start[t] == t > 0: the
// initial state feeds the first document of a row, and final_state is the state after the last token, of the last one.
//
// Computed in chunks of 64 tokens, on the CPU of 16 (kernels/kda/README.md has the derivation): a [K,V] state per
// chunk, triangular products inside the chunk.
//
// Shapes: q, k, gate [B*T, H*K], v, o [B*T, H*V] (any ld), beta [B*T, H] (any ld); A_log [H] F32, dt_bias [H*K] F32;
// initial_state, final_state [B,H,K,V] F32 (each may be empty); document_start [B,T] I32 (may be empty).
// Activations (q, k, v, gate, beta, o and their gradients) have one dtype: F32 on the CPU; F32 or BF16 on CUDA, where K
// and V are at most 256.
// saved: F32 [kda_saved_elements], opaque: what forward keeps for backward (empty: inference, nothing is kept).
//   CPU:  the state every 64 tokens of a document; per token e and two rows of 16 scores: V + 32 numbers.
//   CUDA: the state at the entry of every chunk, in the dtype of the activations.
// Backward overwrites dq, dk, dv, dgate, dbeta and d_initial_state; adds to dA_log and ddt_bias.
// Errors: lower_bound outside [-5.9, 0) is refused by the config (a 16-token tile would overflow).
// Source: Kimi K3 report, section 2.1; the recurrence is its equation 1.
#pragma once

#include <optional>

#include "kernels/core/stream.h"

namespace kestrel {

struct KdaDims {
  int64_t B, T, H, K, V;
};

struct KdaInputs {
  Tensor q, k, v, gate, beta;
  Tensor A_log, dt_bias;
  std::optional<float> lower_bound = -5.f;
  Tensor initial_state;
  Tensor document_start;
};

struct KdaGrads {
  Tensor dq, dk, dv, dgate, dbeta;
  Tensor dA_log, ddt_bias;  // added to
  Tensor d_initial_state;   // may be empty
};

// Elements (F32) of `saved`: on the CPU, and on any device.
int64_t kda_saved_elements(const KdaDims& d);
int64_t kda_saved_elements(const KdaDims& d, Device device, DType activations);

void kda_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved);
void kda_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads);

namespace cpu {
// The definition, token by token: what the chunked form is tested and timed against.
void kda_recurrence_forward(const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state);
void kda_recurrence_backward(const KdaDims& d, const KdaInputs& in, Tensor d_o, Tensor d_final_state,
                             const KdaGrads& grads);
}  // namespace cpu

}  // namespace kestrel
