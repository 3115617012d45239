// One chain of KDA: one batch row and one head.  Views of its tensors, which the chunked form and the token-by-token
// form share; and what happens to a token before and after the recurrence (L2 norm, gate), as the latter computes it.
#pragma once

#include <cstring>
#include <optional>

#include "kernels/core/math.h"
#include "kernels/kda/kda.h"

namespace kestrel::cpu::kda {

// |x| = (sum x^2 + this)^(1/2)
constexpr float kNormEpsilon = 1e-6f;

// The rows of one head inside a tensor [B*T, H*width], any ld: row t is token t of the chain.
struct Rows {
  float* p = nullptr;
  int64_t ld = 0;
  float* operator[](int64_t t) const { return p + t * ld; }
};

// g = bound * sigmoid(rate (x + bias)), or g = -rate softplus(x + bias); rate = exp(A_log).
struct Gate {
  float rate = 1;
  const float* bias = nullptr;  // [K]
  std::optional<float> bound;
};

struct ChainInputs {
  Rows q, k, v, gate, beta;  // [T, K], [T, K], [T, V], [T, K], [T, 1] (logits)
  Gate g;
  const float* initial_state = nullptr;     // [K, V] or none: zero
  const int32_t* document_start = nullptr;  // [T] or none: one document
};

struct ChainGrads {
  Rows dq, dk, dv, dgate, dbeta;
  float* d_initial_state = nullptr;  // [K, V] or none
  float* d_dt_bias = nullptr;        // [K], this chain's share, overwritten
  float* d_A_log = nullptr;          // [1], likewise
};

// Chain c = b H + h.
ChainInputs chain_inputs(const KdaDims& d, const KdaInputs& in, int64_t c);
ChainGrads chain_grads(const KdaDims& d, const KdaGrads& g, int64_t c, float* d_dt_bias, float* d_A_log);
Rows chain_rows(const KdaDims& d, const Tensor& t, int64_t c, int64_t width);
float* chain_state(const KdaDims& d, const Tensor& t, int64_t c);  // [K, V] of t [B,H,K,V]; nullptr when t is empty

// Adds the chains' shares d_dt_bias [B*H, K] and d_A_log [B*H] to the parameters' gradients, in the order of the batch.
void add_parameter_grads(const KdaDims& d, const KdaGrads& g, const float* d_dt_bias, const float* d_A_log);

// The token starts a document inside the row: the state restarts from zero before it.
inline bool restarts(const ChainInputs& in, int64_t t) {
  return in.document_start != nullptr && t > 0 && in.document_start[t] == t;
}

// 1 / sqrt(sum x^2 + 1e-6)
float reciprocal_norm(const float* x, int64_t n);
// dx of y = scale x r with r = reciprocal_norm(x):  dx = scale r (dy - x r^2 <x, dy>), all from the raw x.
void norm_backward(const float* x, float r, float scale, const float* dy, int64_t n, float* dx);

// decay = e^g [K], in [0, 1].
void decay_forward(const Gate& gate, const float* x, int64_t K, float* decay);
// From dg [K]: dx (overwritten), and the token's share added to d_bias [K] and returned (d A_log).
float decay_backward(const Gate& gate, const float* x, const float* dg, int64_t K, float* dx, float* d_bias);

}  // namespace kestrel::cpu::kda
