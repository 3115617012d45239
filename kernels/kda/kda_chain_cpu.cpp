#include <algorithm>

#include "kernels/kda/kda_chain.h"

namespace kestrel::cpu::kda {
namespace {

// exp(A_log) stays finite, so that 0 * rate is 0 where the gate is saturated.
constexpr float kHighestALog = 80.f;
// The softplus gate has no bound.  Below this exp_f gives zero, so nothing depends on g any more.
constexpr float kLowestLogDecay = -87.33654f;

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x| in (0, 1], and log(1 + u) = 2 atanh(y), y = u / (2 + u) <= 1/3:
// eight terms of the series leave 2e-9.  Unlike log1p it vectorises.
inline float log_one_plus_exp(float x) {
  const float u = exp_f(-std::fabs(x));
  const float y = u / (2.f + u), y2 = y * y;
  float p = 1.f / 15.f;
  for (int n = 13; n >= 1; n -= 2) p = p * y2 + 1.f / static_cast<float>(n);
  return (x > 0.f ? x : 0.f) + 2.f * y * p;
}

}  // namespace

float* chain_state(const KdaDims& d, const Tensor& t, int64_t c) {
  return t ? t.f32() + c * d.K * d.V : nullptr;
}

Rows chain_rows(const KdaDims& d, const Tensor& t, int64_t c, int64_t width) {
  const int64_t b = c / d.H, h = c % d.H;
  return {t.f32() + b * d.T * t.ld + h * width, t.ld};
}

ChainInputs chain_inputs(const KdaDims& d, const KdaInputs& in, int64_t c) {
  const int64_t b = c / d.H, h = c % d.H;
  ChainInputs chain;
  chain.q = chain_rows(d, in.q, c, d.K);
  chain.k = chain_rows(d, in.k, c, d.K);
  chain.v = chain_rows(d, in.v, c, d.V);
  chain.gate = chain_rows(d, in.gate, c, d.K);
  chain.beta = chain_rows(d, in.beta, c, 1);
  chain.g = {std::exp(std::min(in.A_log.f32()[h], kHighestALog)), in.dt_bias.f32() + h * d.K, in.lower_bound};
  chain.initial_state = chain_state(d, in.initial_state, c);
  if (in.document_start) chain.document_start = in.document_start.i32() + b * d.T;
  return chain;
}

ChainGrads chain_grads(const KdaDims& d, const KdaGrads& g, int64_t c, float* d_dt_bias, float* d_A_log) {
  return {chain_rows(d, g.dq, c, d.K),  chain_rows(d, g.dk, c, d.K),
          chain_rows(d, g.dv, c, d.V),  chain_rows(d, g.dgate, c, d.K),
          chain_rows(d, g.dbeta, c, 1), chain_state(d, g.d_initial_state, c),
          d_dt_bias + c * d.K,          d_A_log + c};
}

void add_parameter_grads(const KdaDims& d, const KdaGrads& g, const float* d_dt_bias, const float* d_A_log) {
  for (int64_t h = 0; h < d.H; ++h) {
    for (int64_t b = 0; b < d.B; ++b) {
      const int64_t c = b * d.H + h;
      g.dA_log.f32()[h] += d_A_log[c];
      for (int64_t i = 0; i < d.K; ++i) g.ddt_bias.f32()[h * d.K + i] += d_dt_bias[c * d.K + i];
    }
  }
}

float reciprocal_norm(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1.f / std::sqrt(sum + kNormEpsilon);
}

void norm_backward(const float* x, float r, float scale, const float* dy, int64_t n, float* dx) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += x[i] * dy[i];
  const float along = r * r * dot;
  for (int64_t i = 0; i < n; ++i) dx[i] = scale * r * (dy[i] - x[i] * along);
}

void decay_forward(const Gate& gate, const float* __restrict x, int64_t K, float* __restrict decay) {
  const float rate = gate.rate, bound = gate.bound.value_or(0.f);
  const float* __restrict bias = gate.bias;
  if (gate.bound) {
    for (int64_t i = 0; i < K; ++i) decay[i] = exp_f(bound * sigmoid_f(rate * (x[i] + bias[i])));
  } else {
    for (int64_t i = 0; i < K; ++i) decay[i] = exp_f(-rate * log_one_plus_exp(x[i] + bias[i]));
  }
}

// bounded:   z = rate (x + bias), g = bound sg, sg = sigmoid(z):
//            dx = dg bound sg (1 - sg) rate,  dA_log = dx (x + bias)
// softplus:  g = -rate softplus(x + bias):
//            dx = -dg rate sigmoid(x + bias),  dA_log = dg g;  nothing below the floor
// sg (1 - sg) is taken as u / (1 + u)^2 with u = e^-|z|: the difference would lose the digits of a saturated gate.
float decay_backward(const Gate& gate, const float* __restrict x, const float* __restrict dg, int64_t K,
                     float* __restrict dx, float* __restrict d_bias) {
  const float rate = gate.rate, bound = gate.bound.value_or(0.f);
  const float* __restrict bias = gate.bias;
  float d_A_log = 0;
  if (gate.bound) {
#pragma omp simd reduction(+ : d_A_log)
    for (int64_t i = 0; i < K; ++i) {
      const float y = x[i] + bias[i], z = rate * y;
      const float u = exp_f(-std::fabs(z)), one_plus = 1.f + u;
      const float d = dg[i] * bound * (u / (one_plus * one_plus)) * rate;
      dx[i] = d;
      d_bias[i] += d;
      d_A_log += d * y;
    }
  } else {
#pragma omp simd reduction(+ : d_A_log)
    for (int64_t i = 0; i < K; ++i) {
      const float y = x[i] + bias[i];
      const float g = -rate * log_one_plus_exp(y);
      const float alive = g > kLowestLogDecay ? dg[i] : 0.f;
      const float d = -alive * rate * sigmoid_f(y);
      dx[i] = d;
      d_bias[i] += d;
      d_A_log += alive * (g > kLowestLogDecay ? g : 0.f);
    }
  }
  return d_A_log;
}

}  // namespace kestrel::cpu::kda
