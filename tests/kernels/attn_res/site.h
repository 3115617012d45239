// Float64 forms of a mix and of a residual site.
#pragma once

#include <algorithm>

#include "kernels/attn_res/attn_res.h"
#include "tests/kernels/norm/naive.h"

namespace kestrel::test {

// Sources [S] of [N,D] flat -> [N,D].
inline Doubles naive_mix(const std::vector<Doubles>& v, const Doubles& g, const Doubles& q, double eps) {
  const size_t D = g.size(), S = v.size();
  Doubles y(v[0].size());
  for (size_t row = 0; row < y.size(); row += D) {
    Doubles e(S);
    double sum = 0;
    for (size_t j = 0; j < S; ++j) {
      double squares = 0, score = 0;
      for (size_t c = 0; c < D; ++c) {
        squares += v[j][row + c] * v[j][row + c];
        score += g[c] * q[c] * v[j][row + c];
      }
      sum += e[j] = std::exp(score / std::sqrt(squares / static_cast<double>(D) + eps));
    }
    for (size_t j = 0; j < S; ++j) {
      for (size_t c = 0; c < D; ++c) y[row + c] += e[j] / sum * v[j][row + c];
    }
  }
  return y;
}

inline Doubles naive_norm(const Doubles& x, const Doubles& w, double eps) {
  const size_t D = w.size();
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += D) {
    double squares = 0;
    for (size_t c = 0; c < D; ++c) squares += x[row + c] * x[row + c];
    const double r = 1 / std::sqrt(squares / static_cast<double>(D) + eps);
    for (size_t c = 0; c < D; ++c) y[row + c] = w[c] * x[row + c] * r;
  }
  return y;
}

}  // namespace kestrel::test
