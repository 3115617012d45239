// CPU side of the balancing.  Included by this room and its tests only.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/router/balancing.h"

namespace kestrel::cpu {

// The histogram's bins, from the bias of the running step: bin(r) = floor((r - lo) per_unit).  All in fp32, in this
// order of operations: every device and every rank must find the same integers.
struct QuantileBins {
  float lo, per_unit;
};
inline QuantileBins quantile_bins(const float* bias, int64_t experts, int64_t bins) {
  float low = bias[0], high = bias[0];
  for (int64_t j = 1; j < experts; ++j) {
    low = std::min(low, bias[j]);
    high = std::max(high, bias[j]);
  }
  return {low - 1.f, static_cast<float>(bins) / (high - low + 2.f)};
}

enum class Input : uint8_t { logits, scores };

// Adds the counts of N tokens; `in` [N,E] holds logits or already scores.
void quantile_histogram(Tensor hist, Tensor in, Input kind, Tensor cutoff, Tensor bias, Tensor valid);
void score_histogram(Tensor hist, Tensor in, Input kind, Tensor valid);
// next [E] F64 is scratch.
void quantile_solve(Tensor bias, Tensor hist, int64_t k, float gain, Tensor next);
void dynamic_solve(Tensor bias, Tensor hist, int64_t k, float ema);
void margins(Tensor out, Tensor logits, Tensor cutoff, Tensor valid);
void exact_solve(Tensor b_hat, Tensor margins, int64_t k, bool centre);
void sign_solve(Tensor bias, Tensor load, float rate);

// x with P(Z > x) = p for a standard normal Z, 0 < p < 1.
double normal_upper_quantile(double p);

}  // namespace kestrel::cpu
