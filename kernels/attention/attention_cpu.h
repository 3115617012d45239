// CPU side of attention.  Included by this room only.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/core/math.h"

namespace kestrel::cpu {

constexpr int64_t kAttentionTile = 64;  // queries and keys of one tile of scores: 16 KB on the stack

inline int64_t attention_tiles(int64_t T) {
  return (T + kAttentionTile - 1) / kAttentionTile;
}

// Running softmax of one query: largest score so far and sum of e^(score - largest).
struct SoftmaxRow {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.f;

  // Takes in the visible scores s[lo, hi) of a tile of `cols` and replaces all of s by e^(s - largest), zero where
  // invisible.  Returns the factor that what was summed before must be multiplied with.
  float absorb(float* s, int64_t lo, int64_t hi, int64_t cols) {
    if (lo >= hi) {
      std::fill(s, s + cols, 0.f);
      return 1.f;
    }
    float m = largest;
#pragma omp simd reduction(max : m)
    for (int64_t j = lo; j < hi; ++j) m = s[j] > m ? s[j] : m;
    float added = 0.f;
#pragma omp simd reduction(+ : added)
    for (int64_t j = lo; j < hi; ++j) {
      s[j] = exp_f(s[j] - m);
      added += s[j];
    }
    std::fill(s, s + lo, 0.f);
    std::fill(s + hi, s + cols, 0.f);
    const float factor = exp_f(largest - m);
    sum = sum * factor + added;
    largest = m;
    return factor;
  }
};

// row_max [B,H,tiles] F32 or empty: the largest score of each tile of queries.
void attention_forward(const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit, Tensor row_max);
// delta [B,H,T] F32: scratch.
void attention_backward(const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o, Tensor lse,
                        Tensor q, Tensor k, Tensor v, Tensor document_start, Tensor delta);

void mla_assemble_forward(const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared);
void mla_assemble_backward(const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv);

// Tokens decoded at a time: with all their heads about a thousand rows of scratch.
inline int64_t decode_block(int64_t tokens, int64_t heads) {
  return std::clamp(1024 / heads, int64_t{1}, std::max(tokens, int64_t{1}));
}
// query [block * H, c + rope], sum [block * H, c]: scratch.
void mla_decode(const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared, Tensor kv_b,
                Tensor query, Tensor sum);

}  // namespace kestrel::cpu
