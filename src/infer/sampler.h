// Choosing the next token from logits.
//
// temperature 0: the largest logit (the lowest id among equals).  Otherwise softmax(logits / temperature), cut to the
// top_k largest (0: all) and then to the smallest set whose probability reaches top_p, renormalised.  One draw of a
// counter-based generator per token: (seed, position) decides it.
#pragma once

#include <cstdint>
#include <span>

namespace kestrel {

struct Sampling {
  double temperature = 1.0;
  int64_t top_k = 0;
  double top_p = 1.0;
  uint64_t seed = 0;
};

// ConfigError when a value is out of range.
void check_sampling(const Sampling& s);
int32_t choose_token(std::span<const float> logits, const Sampling& sampling, int64_t position);

}  // namespace kestrel
