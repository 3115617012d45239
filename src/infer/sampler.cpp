#include "src/infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/core/error.h"
#include "src/model/random.h"

namespace kestrel {

void check_sampling(const Sampling& s) {
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature))
    throw ConfigError(text("temperature is ", s.temperature, ", it must be 0 (greedy) or more"));
  if (s.top_k < 0) throw ConfigError(text("top-k is ", s.top_k, ", it must be 0 (all tokens) or more"));
  if (!(s.top_p > 0 && s.top_p <= 1)) throw ConfigError(text("top-p is ", s.top_p, ", it must lie in (0, 1]"));
}

int32_t choose_token(std::span<const float> logits, const Sampling& sampling, int64_t position) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (sampling.temperature == 0) return static_cast<int32_t>(largest - logits.begin());

  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(order.size())) {
    std::partial_sort(order.begin(), order.begin() + sampling.top_k, order.end(), before);
    order.resize(static_cast<size_t>(sampling.top_k));
  } else {
    std::sort(order.begin(), order.end(), before);
  }
  std::vector<double> p;
  double sum = 0;
  for (int32_t id : order) {
    p.push_back(std::exp((static_cast<double>(logits[static_cast<size_t>(id)]) - static_cast<double>(*largest)) /
                         sampling.temperature));
    sum += p.back();
  }
  double kept = 0;
  size_t n = 0;
  while (n < p.size() && (n == 0 || kept < sampling.top_p * sum)) kept += p[n++];
  const double u = CounterRandom(sampling.seed, "generate").uniform(static_cast<uint64_t>(position)) * kept;
  double cumulative = 0;
  for (size_t i = 0; i < n; ++i) {
    cumulative += p[i];
    if (u < cumulative) return order[i];
  }
  return order[n - 1];
}

}  // namespace kestrel
