// Tokens into a chunk: norm, gate, beta, running products of decays.  And rows back out.  Included once per instruction
// set (kda_chains.h).
#pragma once

#include "kernels/kda/kda_chunk.h"
#include "kernels/kda/kda_vector.h"

namespace kestrel::cpu::kda {
namespace {

static_assert(kChunk == kBlock);

// Element (i, c) of an array [16,K], c a multiple of W.
template <int W>
[[gnu::always_inline]] inline int64_t at(int64_t i, int64_t c) {
  constexpr int64_t kWithin = kBlock - 1;
  return (c & ~kWithin) * kBlock + i * kBlock + (c & kWithin);
}

// The rows of a span, from row 0 on: as they lie, or as padded copies where their length is not that of the scratch.
inline Rows padded_rows(Rows from, Span span, int64_t n, int64_t padded, float* copies) {
  if (n == padded) return {from[span.begin], from.ld};
  for (int64_t i = 0; i < span.size(); ++i) {
    for (int64_t c = 0; c < padded; ++c) copies[i * padded + c] = c < n ? from[span.begin + i][c] : 0.f;
  }
  return {copies, padded};
}

// Rows of the chain into [16,n], absent ones zero.
template <int W>
inline void load_rows(Rows from, Span span, int64_t n, int64_t padded, float* to) {
  for (int64_t i = 0; i < span.size(); ++i) {
    const float* row = from[span.begin + i];
    int64_t c = 0;
    for (; c + W <= n; c += W) store<W>(to + at<W>(i, c), load<W>(row + c));
    for (; c < padded; ++c) to[at<W>(i, c)] = c < n ? row[c] : 0.f;
  }
  for (int64_t i = span.size(); i < kChunk; ++i) {
    for (int64_t c = 0; c < padded; c += W) store<W>(to + at<W>(i, c), Vec<W>{});
  }
}

// f(c) gives columns [c, c + W) of a row of n.
template <int W, class F>
[[gnu::always_inline]] inline void store_row(float* to, int64_t n, F&& f) {
  int64_t c = 0;
  for (; c + W <= n; c += W) store<W>(to + c, f(c));
  if (c == n) return;
  const Vec<W> last = f(c);
  for (int64_t l = 0; c + l < n; ++l) to[c + l] = last[l];
}

// Rows of [16,n] back out.
template <int W>
inline void store_rows(const float* from, Span span, int64_t n, Rows to) {
  for (int64_t i = 0; i < span.size(); ++i) {
    store_row<W>(to[span.begin + i], n, [&](int64_t c) { return load<W>(from + at<W>(i, c)); });
  }
}

// a = e^g, and for backward dg/dx and dg/dA_log, of one vector of gates; y = x + bias.
//   bounded:   g = bound sg, sg = sigmoid(z), z = rate y;   dg/dx = bound sg (1 - sg) rate,  dg/dA_log = y dg/dx
//   softplus:  g = -rate softplus(y);                       dg/dx = -rate sigmoid(y),        dg/dA_log = g
// All through u = e^-|z|: sg (1 - sg) is u / (1 + u)^2, where 1 - sg would have lost its digits in a saturated gate.
template <int W>
struct GateValue {
  Vec<W> decay, slope, A_slope;
};

template <int W>
[[gnu::always_inline]] inline GateValue<W> bounded_gate(Vec<W> y, float rate, float bound) {
  const Vec<W> z = rate * y;
  const Vec<W> u = exp_of_negative<W>(z > 0.f ? -z : z);
  const Vec<W> w = 1.f / (1.f + u);
  const Vec<W> slope = bound * (u * w * w) * rate;
  return {exp_in_range<W>(bound * (z > 0.f ? w : u * w)), slope, slope * y};
}

// Below -87.3 e^g is zero and nothing depends on g any more.
template <int W>
[[gnu::always_inline]] inline GateValue<W> softplus_gate(Vec<W> y, float rate) {
  const Vec<W> u = exp_of_negative<W>(y > 0.f ? -y : y);
  const Vec<W> w = 1.f / (1.f + u);
  const Vec<W> g = -rate * ((y > 0.f ? y : Vec<W>{}) + log_one_plus<W>(u));
  const Mask<W> alive = g > kLowestLog;
  return {exp_of_negative<W>(g), alive ? -rate * (y > 0.f ? w : u * w) : Vec<W>{}, alive ? g : Vec<W>{}};
}

// squares[i] = 16 partial sums of the squares of row i
template <int W>
[[gnu::always_inline]] inline void sum_squares(const float* row, int64_t K, float* squares) {
  Vec<W> sum[kBlock / W] = {};
  for (int64_t c = 0; c < K; c += kBlock) {
    repeat<kBlock / W>([&](auto l) {
      const Vec<W> x = load<W>(row + c + l * W);
      sum[l] += x * x;
    });
  }
  repeat<kBlock / W>([&](auto l) { store<W>(squares + l * W, sum[l]); });
}

// norms[i] = 1 / sqrt(sum x^2 + 1e-6)
template <int W>
inline void reciprocal_norms(const float* squares, float* norms) {
  sum_rows<W>(squares, norms);
  for (int i = 0; i < kBlock; ++i) norms[i] = 1.f / std::sqrt(norms[i] + kNormEpsilon);
}

// What a chunk reads: rows 0 ... of q, k and gate.
struct TokenRows {
  Rows q, k, gate;
};

// A vector of channels of all tokens: q, k, a and their running products.
template <int W, bool kBackward, bool kBounded>
inline void load_channels(const TokenRows& rows, const Gate& gate, float bound, const float* q_scale, Span span,
                          int64_t c, const ChunkWork& w, Chunk& x) {
  const Vec<W> bias = load<W>(w.bias + c);
  Vec<W> running = splat<W>(1.f);
  int64_t p = at<W>(0, c);
  for (int64_t i = 0; i < span.size(); ++i, p += kBlock) {
    const Vec<W> y = load<W>(rows.gate[i] + c) + bias;
    const GateValue<W> g = kBounded ? bounded_gate<W>(y, gate.rate, bound) : softplus_gate<W>(y, gate.rate);
    const Vec<W> q = load<W>(rows.q[i] + c) * q_scale[i], k = load<W>(rows.k[i] + c) * x.k_norm[i];
    running *= g.decay;
    store<W>(x.q + p, q);
    store<W>(x.k + p, k);
    store<W>(x.decay + p, g.decay);
    store<W>(x.q_in + p, q * running);
    store<W>(x.k_in + p, k * running);
    if constexpr (kBackward) {
      store<W>(x.decay_in + p, running);
      store<W>(x.gate_slope + p, g.slope);
      store<W>(x.A_slope + p, g.A_slope);
    }
  }
  for (int64_t i = span.size(); i < kChunk; ++i, p += kBlock) {  // tokens that are not there
    for (float* zero : {x.q, x.k, x.q_in, x.k_in}) store<W>(zero + p, Vec<W>{});
    store<W>(x.decay + p, splat<W>(1.f));
    if constexpr (kBackward) {
      store<W>(x.decay_in + p, running);
      store<W>(x.gate_slope + p, Vec<W>{});
      store<W>(x.A_slope + p, Vec<W>{});
    }
  }
  store<W>(x.decay_all + c, running);
}

// q, k, decays and beta of a chunk.
template <int W, bool kBackward>
inline void load_chunk(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, Chunk& x) {
  const TokenRows rows{padded_rows(in.q, span, d.K, w.K, w.rows_q), padded_rows(in.k, span, d.K, w.K, w.rows_k),
                       padded_rows(in.gate, span, d.K, w.K, w.rows_gate)};
  alignas(64) float q_squares[kBlockSize] = {}, k_squares[kBlockSize] = {}, q_scale[kBlock];
  for (int64_t i = 0; i < span.size(); ++i) {
    sum_squares<W>(rows.q[i], w.K, q_squares + i * kBlock);
    sum_squares<W>(rows.k[i], w.K, k_squares + i * kBlock);
    x.beta[i] = in.beta[span.begin + i][0];
  }
  reciprocal_norms<W>(q_squares, x.q_norm);
  reciprocal_norms<W>(k_squares, x.k_norm);
  const float scale = 1.f / std::sqrt(static_cast<float>(d.K));
  for (int64_t i = 0; i < kBlock; ++i) {
    q_scale[i] = scale * x.q_norm[i];
    x.beta[i] = i < span.size() ? sigmoid_f(x.beta[i]) : 0.f;
  }
  for (int64_t c = 0; c < w.K; c += W) {
    if (in.g.bound.has_value()) {
      load_channels<W, kBackward, true>(rows, in.g, *in.g.bound, q_scale, span, c, w, x);
    } else {
      load_channels<W, kBackward, false>(rows, in.g, 0.f, q_scale, span, c, w, x);
    }
  }
}

// The state between its plain layout [K,V] (nullptr: zero) and panels of `rows` (padded) rows.
template <int W>
inline void load_state(const KdaDims& d, const float* plain, ChunkWork& w) {
  for (int64_t r = 0; r < w.K; ++r) {
    for (int64_t c = 0; c < w.V; ++c) {
      const bool there = plain != nullptr && r < d.K && c < d.V;
      w.state[(c / kBlock * w.K + r) * kBlock + c % kBlock] = there ? plain[r * d.V + c] : 0.f;
    }
  }
}

template <int W>
inline void store_state(const KdaDims& d, const ChunkWork& w, float* plain) {
  for (int64_t r = 0; r < d.K; ++r) {
    store_row<W>(plain + r * d.V, d.V,
                 [&](int64_t c) { return load<W>(w.state + (c / kBlock * w.K + r) * kBlock + c % kBlock); });
  }
}

// The same for a transposed state, K/16 panels [V,16].
template <int W>
inline void load_state_t(const KdaDims& d, const float* plain, const ChunkWork& w, float* state_t) {
  for (int64_t r = 0; r < w.K; r += kBlock) {
    for (int64_t c = 0; c < w.V; c += kBlock) {
      float* to = state_t + (r / kBlock * w.V + c) * kBlock;
      if (plain != nullptr && r + kBlock <= d.K && c + kBlock <= d.V) {
        transpose_block<W>(plain + r * d.V + c, d.V, to);
        continue;
      }
      for (int64_t i = 0; i < kBlock; ++i) {
        for (int64_t j = 0; j < kBlock; ++j) {
          const bool there = plain != nullptr && r + i < d.K && c + j < d.V;
          to[j * kBlock + i] = there ? plain[(r + i) * d.V + c + j] : 0.f;
        }
      }
    }
  }
}

inline void store_state_t(const KdaDims& d, const ChunkWork& w, const float* state_t, float* plain) {
  for (int64_t r = 0; r < d.K; ++r) {
    for (int64_t c = 0; c < d.V; ++c) plain[r * d.V + c] = state_t[(r / kBlock * w.V + c) * kBlock + r % kBlock];
  }
}

}  // namespace
}  // namespace kestrel::cpu::kda
