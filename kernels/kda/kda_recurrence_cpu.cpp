// The definition of KDA, token by token, and its adjoint: one state of K x V numbers walked through the sequence.
#include <algorithm>
#include <vector>

#include "kernels/core/parallel.h"
#include "kernels/kda/kda_chain.h"
#include "kernels/kda/kda_cpu.h"

namespace kestrel::cpu {
namespace {

using namespace kda;

// Backward needs the state after every token: it is kept every kStretch tokens and recomputed in between.
constexpr int64_t kStretch = 64;

// What a token brings, normalised, and what it found.
struct Token {
  std::vector<float> q, k, decay, e, u;  // [K] [K] [K] [V] [V]
  float q_norm = 0, k_norm = 0, beta = 0;
  explicit Token(const KdaDims& d)
      : q(size_t(d.K)), k(size_t(d.K)), decay(size_t(d.K)), e(size_t(d.V)), u(size_t(d.V)) {}
};

void load_token(const KdaDims& d, const ChainInputs& in, int64_t t, Token& x) {
  x.q_norm = reciprocal_norm(in.q[t], d.K);
  x.k_norm = reciprocal_norm(in.k[t], d.K);
  x.beta = sigmoid_f(in.beta[t][0]);
  const float scale = x.q_norm / std::sqrt(static_cast<float>(d.K));
  for (int64_t i = 0; i < d.K; ++i) {
    x.q[size_t(i)] = in.q[t][i] * scale;
    x.k[size_t(i)] = in.k[t][i] * x.k_norm;
  }
  decay_forward(in.g, in.gate[t], d.K, x.decay.data());
}

// S <- diag(a) S;  e = v - S^T k;  u = beta e;  S <- S + k u^T;  o = S^T q (o may be nullptr).
// `from` and `to` are the state before and after; they may be the same.
void step(const KdaDims& d, const float* v, Token& x, const float* from, float* to, float* o) {
  const int64_t V = d.V;
  float *e = x.e.data(), *u = x.u.data();
  std::copy(v, v + V, e);
  for (int64_t i = 0; i < d.K; ++i) {
    const float a = x.decay[size_t(i)], k = x.k[size_t(i)];
    const float* before = from + i * V;
    float* S = to + i * V;
#pragma omp simd
    for (int64_t j = 0; j < V; ++j) {
      S[j] = a * before[j];
      e[j] -= k * S[j];
    }
  }
  for (int64_t j = 0; j < V; ++j) u[j] = x.beta * e[j];
  if (o != nullptr) std::fill(o, o + V, 0.f);
  for (int64_t i = 0; i < d.K; ++i) {
    const float q = x.q[size_t(i)], k = x.k[size_t(i)];
    float* S = to + i * V;
    if (o != nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < V; ++j) {
        S[j] += k * u[j];
        o[j] += q * S[j];
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < V; ++j) S[j] += k * u[j];
    }
  }
}

// The adjoint of one step.  dS: the gradient of the state after the token, made that of the state before it.
struct TokenGrads {
  std::vector<float> q, k, g, e, u;  // [K] [K] [K] [V] [V]
  float beta = 0;
  explicit TokenGrads(const KdaDims& d)
      : q(size_t(d.K)), k(size_t(d.K)), g(size_t(d.K)), e(size_t(d.V)), u(size_t(d.V)) {}
};

void step_backward(const KdaDims& d, const Token& x, const float* before, const float* after, const float* d_o,
                   float* dS, TokenGrads& g) {
  const int64_t V = d.V;
  const float *e = x.e.data(), *u = x.u.data();
  float *d_e = g.e.data(), *d_u = g.u.data();
  std::fill(d_u, d_u + V, 0.f);
  for (int64_t i = 0; i < d.K; ++i) {  // o = S^T q and the write k u^T
    const float q = x.q[size_t(i)], k = x.k[size_t(i)];
    const float* S = after + i * V;
    float *D = dS + i * V, d_q = 0;
#pragma omp simd reduction(+ : d_q)
    for (int64_t j = 0; j < V; ++j) {
      d_q += S[j] * d_o[j];
      D[j] += q * d_o[j];
      d_u[j] += k * D[j];
    }
    g.q[size_t(i)] = d_q;
  }
  g.beta = 0;
  for (int64_t j = 0; j < V; ++j) {
    d_e[j] = x.beta * d_u[j];
    g.beta += d_u[j] * e[j];
  }
  for (int64_t i = 0; i < d.K; ++i) {  // e = v - k^T diag(a) S, then the decay
    const float a = x.decay[size_t(i)], k = x.k[size_t(i)];
    const float* S = before + i * V;
    float *D = dS + i * V, d_k = 0, d_a = 0;
#pragma omp simd reduction(+ : d_k, d_a)
    for (int64_t j = 0; j < V; ++j) {
      const float decayed = D[j] - k * d_e[j];
      d_k += D[j] * u[j] - a * S[j] * d_e[j];
      d_a += decayed * S[j];
      D[j] = a * decayed;
    }
    g.k[size_t(i)] = d_k;
    g.g[size_t(i)] = a * d_a;
  }
}

void store_token_grads(const KdaDims& d, const ChainInputs& in, int64_t t, const Token& x, const TokenGrads& g,
                       const ChainGrads& out) {
  norm_backward(in.q[t], x.q_norm, 1.f / std::sqrt(static_cast<float>(d.K)), g.q.data(), d.K, out.dq[t]);
  norm_backward(in.k[t], x.k_norm, 1.f, g.k.data(), d.K, out.dk[t]);
  std::copy(g.e.begin(), g.e.end(), out.dv[t]);
  out.dbeta[t][0] = g.beta * sigmoid_f(in.beta[t][0]) * sigmoid_f(-in.beta[t][0]);
  *out.d_A_log += decay_backward(in.g, in.gate[t], g.g.data(), d.K, out.dgate[t], out.d_dt_bias);
}

void set_state(const KdaDims& d, float* S, const float* from) {
  if (from != nullptr) {
    std::copy(from, from + d.K * d.V, S);
  } else {
    std::fill(S, S + d.K * d.V, 0.f);
  }
}

void forward_chain(const KdaDims& d, const ChainInputs& in, Rows o, float* final_state) {
  std::vector<float> S(size_t(d.K * d.V));
  Token x(d);
  set_state(d, S.data(), in.initial_state);
  for (int64_t t = 0; t < d.T; ++t) {
    if (restarts(in, t)) set_state(d, S.data(), nullptr);
    load_token(d, in, t, x);
    step(d, in.v[t], x, S.data(), S.data(), o[t]);
  }
  if (final_state != nullptr) std::copy(S.begin(), S.end(), final_state);
}

// The state at the start of every stretch.
std::vector<float> stretch_states(const KdaDims& d, const ChainInputs& in) {
  const int64_t size = d.K * d.V, stretches = (d.T + kStretch - 1) / kStretch;
  std::vector<float> kept(size_t(stretches * size)), S(static_cast<size_t>(size));
  Token x(d);
  set_state(d, S.data(), in.initial_state);
  for (int64_t t = 0; t < d.T; ++t) {
    if (t % kStretch == 0) std::copy(S.begin(), S.end(), kept.data() + t / kStretch * size);
    if (restarts(in, t)) set_state(d, S.data(), nullptr);
    load_token(d, in, t, x);
    step(d, in.v[t], x, S.data(), S.data(), nullptr);
  }
  return kept;
}

void backward_chain(const KdaDims& d, const ChainInputs& in, Rows d_o, const float* d_final_state,
                    const ChainGrads& out) {
  const int64_t size = d.K * d.V, stretches = (d.T + kStretch - 1) / kStretch;
  const std::vector<float> kept = stretch_states(d, in);
  std::vector<float> states(size_t((kStretch + 1) * size)), dS(static_cast<size_t>(size));
  std::vector<Token> tokens(static_cast<size_t>(kStretch), Token(d));
  TokenGrads g(d);
  std::fill(out.d_dt_bias, out.d_dt_bias + d.K, 0.f);
  *out.d_A_log = 0.f;
  set_state(d, dS.data(), d_final_state);
  for (int64_t s = stretches - 1; s >= 0; --s) {
    const int64_t begin = s * kStretch, end = std::min(d.T, begin + kStretch);
    const auto state = [&](int64_t t) { return states.data() + (t - begin) * size; };  // before token t
    set_state(d, state(begin), kept.data() + s * size);
    for (int64_t t = begin; t < end; ++t) {
      Token& x = tokens[size_t(t - begin)];
      if (restarts(in, t)) set_state(d, state(t), nullptr);
      load_token(d, in, t, x);
      step(d, in.v[t], x, state(t), state(t + 1), nullptr);
    }
    for (int64_t t = end - 1; t >= begin; --t) {
      const Token& x = tokens[size_t(t - begin)];
      // A restart overwrites the state after token t - 1 by zero; only q's gradient reads it, so t - 1 rebuilds it.
      if (t + 1 < end && restarts(in, t + 1)) {
        Token again = x;
        step(d, in.v[t], again, state(t), state(t + 1), nullptr);
      }
      step_backward(d, x, state(t), state(t + 1), d_o[t], dS.data(), g);
      store_token_grads(d, in, t, x, g, out);
      if (restarts(in, t)) set_state(d, dS.data(), nullptr);
    }
  }
  if (out.d_initial_state != nullptr) std::copy(dS.begin(), dS.end(), out.d_initial_state);
}

}  // namespace

void kda_recurrence_forward(const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state) {
  check_kda_inputs(d, in);
  check_matrix("o", o, DType::f32, d.B * d.T, d.H * d.V);
  check_kda_state("final_state", d, final_state);
  parallel_for(d.B * d.H, [&](int64_t c) {
    forward_chain(d, chain_inputs(d, in, c), chain_rows(d, o, c, d.V), chain_state(d, final_state, c));
  });
}

void kda_recurrence_backward(const KdaDims& d, const KdaInputs& in, Tensor d_o, Tensor d_final_state,
                             const KdaGrads& grads) {
  check_kda_inputs(d, in);
  check_kda_grads(d, d_o, d_final_state, grads);
  std::vector<float> d_dt_bias(size_t(d.B * d.H * d.K)), d_A_log(size_t(d.B * d.H));
  parallel_for(d.B * d.H, [&](int64_t c) {
    backward_chain(d, chain_inputs(d, in, c), chain_rows(d, d_o, c, d.V), chain_state(d, d_final_state, c),
                   chain_grads(d, grads, c, d_dt_bias.data(), d_A_log.data()));
  });
  add_parameter_grads(d, grads, d_dt_bias.data(), d_A_log.data());
}

}  // namespace kestrel::cpu
