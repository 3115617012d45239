// One chunk, backward: the products of kda_chunk_forward.h differentiated one after another, last to first.  Included
// once per instruction set (kda_chains.h).
#pragma once

#include "kernels/kda/kda_chunk_forward.h"

namespace kestrel::cpu::kda {
namespace {

// Everything of the forward that backward needs, from what was kept: all but the solution and the scores is recomputed.
template <int W>
inline void chunk_recall(const KdaDims& d, const ChainInputs& in, Span span, const Saved& saved, ChunkWork& w,
                         Chunk& x) {
  load_chunk<W, true>(d, in, span, w, x);
  load_rows<W>(saved.e, span, d.V, w.V, x.e);
  for (int64_t i = 0; i < kChunk; ++i) {
    for (int64_t c = 0; c < w.V; c += W) store<W>(x.u + at<W>(i, c), x.beta[i] * load<W>(x.e + at<W>(i, c)));
    for (int64_t l = 0; l < kBlock; l += W) {
      const bool there = i < span.size();
      store<W>(x.Aqk + i * kBlock + l, there ? load<W>(saved.A[span.begin + i] + l) : Vec<W>{});
      store<W>(x.Akk + i * kBlock + l, there ? load<W>(saved.A[span.begin + i] + kBlock + l) : Vec<W>{});
    }
  }
  for (int64_t c = 0; c < w.K; c += W) {  // k_out: products of decays from the other end
    Vec<W> rest = splat<W>(1.f);
    for (int64_t j = kChunk - 1; j >= 0; --j) {
      store<W>(x.k_out + at<W>(j, c), load<W>(x.k + at<W>(j, c)) * rest);
      rest *= load<W>(x.decay + at<W>(j, c));
    }
  }
  transpose_blocks<W>(x.k_out, w.K, x.k_out_t);
}

// S^T of the next chunk from that of this one: S^T diag(a_0 ... a_last) + U^T K_out.
template <int W>
[[gnu::flatten]] inline void advance_state_t(const ChunkWork& w, const Chunk& x, float* next) {
  const int64_t panel = w.V * kBlock;
  for_panels<W>(w.K / kBlock, [&](auto P, int64_t first) {
    for (int64_t v = 0; v < w.V; v += kBlock) {
      for_rows<W, P>([&](auto& sums, int row) {
        sums.template add<As::transposed>(x.u + v * kBlock + row, x.k_out + first * kBlockSize, kBlockSize);
        sums.each([&](int i, int p, int l, Vec<W> sum) {
          const int64_t to = (first + p) * panel + (v + row + i) * kBlock + l;
          const Vec<W> decay = load<W>(x.decay_all + (first + p) * kBlock + l);
          store<W>(next + to, load<W>(x.state_t + to) * decay + sum);
        });
      });
    }
  });
}

// The transposed system, last token first, a vector of columns at a time: dE_i = beta_i dU_i, dU_j -= Akk_ij dE_i for
// all j < i.  d_beta: adds dU_i e_i.
template <int W>
[[gnu::flatten]] inline void solve_errors_backward(const Chunk& x, const float* e, float* d_u, float* d_e,
                                                   float* d_beta) {
  Vec<W> y[kBlock];
  repeat<kBlock>([&](auto i) { y[i] = load<W>(d_u + i * kBlock); });
  repeat<kBlock>([&](auto step) {
    constexpr int i = kBlock - 1 - step;
    const Vec<W> error = x.beta[i] * y[i];
    store<W>(d_e + i * kBlock, error);
    store<W>(d_beta + i * kBlock, load<W>(d_beta + i * kBlock) + y[i] * load<W>(e + i * kBlock));
    repeat<i>([&](auto j) { y[j] -= x.Akk[i * kBlock + j] * error; });
  });
}

// dU = K_out dS + Aqk^T dO, then the transposed system of the errors: d_e (which is also dV), and <dU, e>.
// The product is formed as dU^T, with tokens as lanes: so dS^T, which others need, will do.
template <int W>
[[gnu::flatten]] inline void d_errors(ChunkWork& w, const Chunk& x) {
  std::memset(w.d_beta, 0, kBlockSize * sizeof(float));
  for (int64_t v = 0; v < w.V; v += kBlock) {
    float turned[kBlockSize];
    for_rows<W, 1>([&](auto& sums, int row) {
      w.ahead.some();
      for (int64_t c = 0; c < w.K; c += kBlock) {
        sums.template add<As::plain>(w.d_state_t + c * w.V + (v + row) * kBlock, x.k_out_t + c * kBlock, 0);
      }
      sums.template add<As::transposed>(w.d_o + v * kBlock + row, x.Aqk, 0);
      sums.each([&](int i, int, int l, Vec<W> sum) { store<W>(turned + (row + i) * kBlock + l, sum); });
    });
    transpose_block<W>(turned, kBlock, w.d_u + v * kBlock);
    for (int l = 0; l < kBlock; l += W) {
      const int64_t at = v * kBlock + l;
      solve_errors_backward<W>(x, x.e + at, w.d_u + at, w.d_e + at, w.d_beta + l);
    }
  }
}

// dAqk = dO U^T and dAkk = -dE U^T (the readers keep to j <= i and j < i).
template <int W>
[[gnu::flatten]] inline void d_scores(ChunkWork& w, const Chunk& x) {
  transpose_blocks<W>(x.u, w.V, w.u_t);
  for_rows<W, 1>([&](auto& sums, int row) {
    w.ahead.some();
    for (int64_t v = 0; v < w.V; v += kBlock) {
      sums.template add<As::plain>(w.d_o + v * kBlock + row * kBlock, w.u_t + v * kBlock, 0);
    }
    sums.each([&](int i, int, int l, Vec<W> sum) { store<W>(w.d_Aqk + (row + i) * kBlock + l, sum); });
  });
  for_rows<W, 1>([&](auto& sums, int row) {
    w.ahead.some();
    for (int64_t v = 0; v < w.V; v += kBlock) {
      sums.template add<As::plain>(w.d_e + v * kBlock + row * kBlock, w.u_t + v * kBlock, 0);
    }
    sums.each([&](int i, int, int l, Vec<W> sum) { store<W>(w.d_Akk + (row + i) * kBlock + l, -sum); });
  });
}

// [16,V] times a transposed state, P panels of K: f(place in [16,K], decay to there, sum).
template <int W, int P, class F>
[[gnu::always_inline]] inline void times_state_t(ChunkWork& w, const float* a, const float* state_t, int64_t first,
                                                 F&& f) {
  const int64_t panel = w.V * kBlock;
  for_rows<W, P>([&](auto& sums, int row) {
    w.ahead.some();
    for (int64_t v = 0; v < w.V; v += kBlock) {
      sums.template add<As::plain>(a + (v + row) * kBlock, state_t + first * panel + v * kBlock, panel);
    }
    sums.each([&](int i, int p, int l, Vec<W> sum) { f((first + p) * kBlockSize + (row + i) * kBlock + l, sum); });
  });
}

// Gradients through the products with the state, P panels of K: of Q_in and K_in (times their decays: of q and k), of
// K_out, of the state's decay, and of the state itself,
//   dS = diag(a_0 ... a_last) dS' + Q_in^T dO - K_in^T dE.
template <int W, int P>
[[gnu::flatten]] inline void d_state_panels(ChunkWork& w, const Chunk& x, int64_t first) {
  const int64_t panel = w.V * kBlock;
  times_state_t<W, P>(w, w.d_o, x.state_t, first,
                      [&](int64_t to, Vec<W> sum) { store<W>(w.d_q + to, sum * load<W>(x.decay_in + to)); });
  times_state_t<W, P>(w, w.d_e, x.state_t, first,
                      [&](int64_t to, Vec<W> sum) { store<W>(w.d_k + to, -sum * load<W>(x.decay_in + to)); });
  times_state_t<W, P>(w, x.u, w.d_state_t, first, [&](int64_t to, Vec<W> sum) { store<W>(w.d_k_out + to, sum); });
  for (int64_t c = first * kBlock; c < (first + P) * kBlock; c += W) {
    const int64_t at = c / kBlock * panel + c % kBlock;
    Vec<W> sum[4] = {};
    for (int64_t v = 0; v < w.V; v += 4) {
      repeat<4>([&](auto n) {
        const int64_t r = at + (v + n) * kBlock;
        sum[n] += load<W>(x.state_t + r) * load<W>(w.d_state_t + r);
      });
    }
    store<W>(w.d_decay_end + c, ((sum[0] + sum[1]) + (sum[2] + sum[3])) * load<W>(x.decay_all + c));
  }
  for (int64_t v = 0; v < w.V; v += kBlock) {
    for_rows<W, P>([&](auto& sums, int row) {
      w.ahead.some();
      sums.template add<As::transposed>(w.d_o + v * kBlock + row, x.q_in + first * kBlockSize, kBlockSize);
      sums.template subtract<As::transposed>(w.d_e + v * kBlock + row, x.k_in + first * kBlockSize, kBlockSize);
      sums.each([&](int i, int p, int l, Vec<W> sum) {
        float* to = w.d_state_t + (first + p) * panel + (v + row + i) * kBlock + l;
        store<W>(to, load<W>(to) * load<W>(x.decay_all + (first + p) * kBlock + l) + sum);
      });
    });
  }
}

// Pairs i > j, as the later token, a vector of channels at a time: all earlier keys in registers, carried from token to
// token.  `at`: the first token's place.
template <int W>
[[gnu::flatten]] inline void pairs_as_rows(ChunkWork& w, const Chunk& x, int64_t at) {
  Vec<W> key[kBlock];
  repeat<kBlock>([&](auto row) {
    constexpr int i = row;
    const int64_t to = at + i * kBlock;
    const Vec<W> decay = load<W>(x.decay + to);
    Vec<W> d_q = load<W>(w.d_q + to), d_k = load<W>(w.d_k + to);
    repeat<i>([&](auto j) {
      key[j] *= decay;
      d_q += w.d_Aqk[i * kBlock + j] * key[j];
      d_k += w.d_Akk[i * kBlock + j] * key[j];
    });
    key[i] = load<W>(x.k + to);
    store<W>(w.d_q + to, d_q);
    store<W>(w.d_k + to, d_k);
  });
}

// As the earlier token: its gradient starts at the end of the chunk and walks back to the token, collecting and
// decaying.
template <int W>
[[gnu::flatten]] inline void pairs_as_columns(ChunkWork& w, const Chunk& x, int64_t at) {
  Vec<W> y[kBlock];
  repeat<kBlock>([&](auto j) { y[j] = load<W>(w.d_k_out + at + j * kBlock); });
  repeat<kBlock>([&](auto step) {
    constexpr int i = kBlock - 1 - step;
    const int64_t from = at + i * kBlock;
    const Vec<W> decay = load<W>(x.decay + from), q = load<W>(x.q + from), k = load<W>(x.k + from);
    store<W>(w.d_k_out + from, y[i]);
    repeat<i>([&](auto j) { y[j] = (y[j] + w.d_Aqk[i * kBlock + j] * q + w.d_Akk[i * kBlock + j] * k) * decay; });
  });
}

// The gradient of the log decay of the chunk as a whole:  a_0 ... a_last . rowsum(S . dS') + sum_j k_out_j . dK_out_j.
// The last token's own write is not decayed by anything, so it has no part in it.
template <int W>
inline Vec<W> d_whole_decay(Span span, const ChunkWork& w, const Chunk& x, int64_t c, int64_t at) {
  Vec<W> sum = load<W>(w.d_decay_end + c);
  for (int64_t j = 0; j + 1 < span.size(); ++j) {
    sum += load<W>(x.k_out + at + j * kBlock) * load<W>(w.d_k_out + at + j * kBlock);
  }
  return sum;
}

// From rows and columns to the gradients of q, k (as they are after the norm) and the gate.  A token's own pair (i, i)
// has no decay in it and is left out of dg; so is the last token's write.  Returns this vector's share of dA_log.
template <int W>
inline Vec<W> d_tokens(Span span, ChunkWork& w, const Chunk& x, int64_t c, int64_t at, Vec<W> d_g) {
  const int64_t lane = c % kBlock;
  Vec<W> d_bias{}, d_A_log{};
  for (int64_t i = span.size() - 1; i >= 0; --i) {
    const int64_t to = at + i * kBlock;
    const Vec<W> q = load<W>(x.q + to), k = load<W>(x.k + to);
    const Vec<W> row_q = load<W>(w.d_q + to), row_k = load<W>(w.d_k + to), column = load<W>(w.d_k_out + to);
    const float written = i + 1 == span.size() ? 0.f : 1.f, own = w.d_Aqk[i * kBlock + i];
    d_g += q * row_q + k * (row_k - written * column);
    const Vec<W> d_gate = d_g * load<W>(x.gate_slope + to);
    d_bias += d_gate;
    d_A_log += d_g * load<W>(x.A_slope + to);
    const Vec<W> d_q = row_q + own * k, d_k = row_k + column + own * q;
    store<W>(w.d_gate + to, d_gate);
    store<W>(w.d_q + to, d_q);
    store<W>(w.d_k + to, d_k);
    const int64_t along = i * kBlock + lane;
    store<W>(w.along_q + along, load<W>(w.along_q + along) + q * d_q);
    store<W>(w.along_k + along, load<W>(w.along_k + along) + k * d_k);
  }
  store<W>(w.d_bias + c, load<W>(w.d_bias + c) + d_bias);
  return d_A_log;
}

// Gradients of q, k, gate, dt_bias and A_log.
template <int W>
inline void d_pairs(Span span, ChunkWork& w, const Chunk& x, float* d_A_log) {
  std::memset(w.along_q, 0, kBlockSize * sizeof(float));
  std::memset(w.along_k, 0, kBlockSize * sizeof(float));
  Vec<W> sum{};
  for (int64_t c = 0; c < w.K; c += W) {
    const int64_t first = at<W>(0, c);
    w.ahead.some();
    const Vec<W> d_g = d_whole_decay<W>(span, w, x, c, first);
    pairs_as_rows<W>(w, x, first);
    pairs_as_columns<W>(w, x, first);
    sum += d_tokens<W>(span, w, x, c, first, d_g);
  }
  *d_A_log += sum_of_lanes<W>(sum);
}

// Back through y = scale r x, r = 1 / |x|:  dx = scale r (dy - y <y, dy> / scale^2).
template <int W>
inline void store_through_norm(const float* y, const float* dy, const float* r, const float* along, float scale,
                               Span span, int64_t n, Rows to) {
  for (int64_t i = 0; i < span.size(); ++i) {
    const float part = along[i] / (scale * scale), factor = scale * r[i];
    store_row<W>(to[span.begin + i], n, [&](int64_t c) {
      const int64_t from = at<W>(i, c);
      return factor * (load<W>(dy + from) - part * load<W>(y + from));
    });
  }
}

template <int W>
inline void store_gradients(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, const Chunk& x,
                            const ChainGrads& g) {
  float sums[kBlock];
  sum_rows<W>(w.along_q, sums);
  store_through_norm<W>(x.q, w.d_q, x.q_norm, sums, 1.f / std::sqrt(static_cast<float>(d.K)), span, d.K, g.dq);
  sum_rows<W>(w.along_k, sums);
  store_through_norm<W>(x.k, w.d_k, x.k_norm, sums, 1.f, span, d.K, g.dk);
  store_rows<W>(w.d_gate, span, d.K, g.dgate);
  store_rows<W>(w.d_e, span, d.V, g.dv);
  sum_rows<W>(w.d_beta, sums);
  for (int64_t i = 0; i < span.size(); ++i) {
    g.dbeta[span.begin + i][0] = sums[i] * x.beta[i] * sigmoid_f(-in.beta[span.begin + i][0]);
  }
}

// After chunk_recall, with x.state_t the state that enters.  w.d_state_t is the gradient of the state that leaves on
// entry and of the state that enters on return.
template <int W>
inline void chunk_backward(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, const Chunk& x, Rows d_o,
                           const ChainGrads& g) {
  load_rows<W>(d_o, span, d.V, w.V, w.d_o);
  d_errors<W>(w, x);
  d_scores<W>(w, x);
  for_panels<W>(w.K / kBlock, [&](auto P, int64_t first) { d_state_panels<W, P>(w, x, first); });
  d_pairs<W>(span, w, x, g.d_A_log);
  store_gradients<W>(d, in, span, w, x, g);
}

}  // namespace
}  // namespace kestrel::cpu::kda
