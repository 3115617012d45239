// One chunk, forward.  Included once per instruction set (kda_chains.h).
#pragma once

#include "kernels/kda/kda_chunk_load.h"
#include "kernels/kda/kda_products.h"

namespace kestrel::cpu::kda {
namespace {

// [16,n] turned into [n,16], or back.
template <int W>
inline void transpose_blocks(const float* from, int64_t n, float* to) {
  for (int64_t c = 0; c < n; c += kBlock) transpose_block<W>(from + c * kBlock, kBlock, to + c * kBlock);
}

// Lane l stands for token l + kFirst: x from tokens before i, k from the others.
template <int W, int kFirst, int i>
[[gnu::always_inline]] inline Vec<W> tokens_before(Vec<W> x, Vec<W> k) {
  if constexpr (i <= kFirst) return k;
  if constexpr (i >= kFirst + W) return x;
  return lane_index<W>() < i - kFirst ? x : k;
}

// Scores of tokens [kRow, kRow + kRows) with tokens [kFirst, kFirst + W).  Lanes are the earlier tokens: their keys are
// carried from token to token, times a_i, and meet q_i and k_i; a token's key joins at the token itself.
// k_t: keys as they are; carried: as they stood before token kRow, moved on.
template <int W, int kRow, int kRows, int kFirst>
[[gnu::flatten]] inline void score_strip(const Chunk& x, int64_t K, const float* k_t, float* carried) {
  Vec<W> qk[kRows] = {}, kk[kRows] = {};
  constexpr bool kAny = kRow + kRows > kFirst;  // else all of these tokens come before those of the lanes
  for (int64_t c = 0; kAny && c < K; c += kBlock) {
    const float *q = x.q + c * kBlock, *k = x.k + c * kBlock, *a = x.decay + c * kBlock;
    for (int l = 0; l < kBlock; ++l) {
      const int64_t lane = (c + l) * kBlock + kFirst;
      const Vec<W> own = load<W>(k_t + lane);
      Vec<W> key = load<W>(carried + lane);
      repeat<kRows>([&](auto row) {
        constexpr int i = kRow + row;
        key = tokens_before<W, kFirst, i>(key * a[i * kBlock + l], own);
        if constexpr (i >= kFirst) {
          qk[row] += q[i * kBlock + l] * key;
          kk[row] += k[i * kBlock + l] * key;
        }
      });
      store<W>(carried + lane, key);
    }
  }
  repeat<kRows>([&](auto row) {
    constexpr int i = kRow + row;
    const Mask<W> token = lane_index<W>() + kFirst;
    store<W>(x.Aqk + i * kBlock + kFirst, token <= i ? qk[row] : Vec<W>{});
    store<W>(x.Akk + i * kBlock + kFirst, token < i ? kk[row] : Vec<W>{});
  });
}

// Aqk, Akk, and K_out: the keys as they are when the last token is through.
template <int W>
inline void chunk_scores(ChunkWork& w, Chunk& x) {
  transpose_blocks<W>(x.k, w.K, w.k_t);
  std::memcpy(x.k_out_t, w.k_t, static_cast<size_t>(w.K * kBlock) * sizeof(float));
  constexpr int kRows = W == 16 ? 8 : 4;
  repeat<kBlock / W>([&](auto part) {
    repeat<kBlock / kRows>(
        [&](auto strip) { score_strip<W, strip * kRows, kRows, part * W>(x, w.K, w.k_t, x.k_out_t); });
  });
}

// Forward substitution, a vector of columns at a time, all 16 tokens in registers:
// e_i -= sum_{j<i} Akk_ij u_j;  u_i = beta_i e_i.
template <int W>
[[gnu::flatten]] inline void solve_errors(const float* Akk, const float* beta, float* e, float* u) {
  Vec<W> x[kBlock];
  repeat<kBlock>([&](auto i) { x[i] = load<W>(e + i * kBlock); });
  repeat<kBlock>([&](auto token) {
    constexpr int j = token;
    const Vec<W> written = beta[j] * x[j];
    store<W>(e + j * kBlock, x[j]);
    store<W>(u + j * kBlock, written);
    repeat<kBlock - 1 - j>([&](auto later) {
      constexpr int i = j + 1 + later;
      x[i] -= Akk[i * kBlock + j] * written;
    });
  });
}

// e, u, o and the state that leaves, P panels of V at a time (they know nothing of each other).
template <int W, int P>
[[gnu::flatten]] inline void advance_panels(ChunkWork& w, Chunk& x, int64_t first, float* o) {
  const int64_t panel = w.K * kBlock, offset = first * kBlockSize;
  float* S = w.state + first * panel;
  float *e = x.e + offset, *u = x.u + offset;
  for_rows<W, P>([&](auto& sums, int row) {  // E = V - K_in S
    w.ahead.some();
    for (int64_t c = 0; c < w.K; c += kBlock) {
      sums.template add<As::plain>(x.k_in + c * kBlock + row * kBlock, S + c * kBlock, panel);
    }
    sums.each([&](int i, int p, int l, Vec<W> sum) {
      const int64_t to = p * kBlockSize + (row + i) * kBlock + l;
      store<W>(e + to, load<W>(w.v + offset + to) - sum);
    });
  });
  for (int p = 0; p < P; ++p) {
    for (int l = 0; l < kBlock; l += W) {
      solve_errors<W>(x.Akk, x.beta, e + p * kBlockSize + l, u + p * kBlockSize + l);
    }
  }
  for_rows<W, P>([&](auto& sums, int row) {  // O = Q_in S + Aqk U
    w.ahead.some();
    for (int64_t c = 0; c < w.K; c += kBlock) {
      sums.template add<As::plain>(x.q_in + c * kBlock + row * kBlock, S + c * kBlock, panel);
    }
    sums.template add<As::plain>(x.Aqk + row * kBlock, u, kBlockSize);
    sums.each([&](int i, int p, int l, Vec<W> sum) { store<W>(o + p * kBlockSize + (row + i) * kBlock + l, sum); });
  });
  for (int64_t c = 0; c < w.K; c += kBlock) {  // S = diag(a_0 ... a_last) S + K_out^T U
    for_rows<W, P>([&](auto& sums, int row) {
      w.ahead.some();
      sums.template add<As::plain>(x.k_out_t + (c + row) * kBlock, u, kBlockSize);
      sums.each([&](int i, int p, int l, Vec<W> sum) {
        float* to = S + p * panel + (c + row + i) * kBlock + l;
        store<W>(to, load<W>(to) * x.decay_all[c + row + i] + sum);
      });
    });
  }
}

// From w.state to the state that leaves, with x.e, x.u and the outputs in w.v.
template <int W>
inline void chunk_forward(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, Chunk& x) {
  load_chunk<W, false>(d, in, span, w, x);
  load_rows<W>(in.v, span, d.V, w.V, w.v);
  chunk_scores<W>(w, x);
  for_panels<W>(w.V / kBlock,
                [&](auto P, int64_t first) { advance_panels<W, P>(w, x, first, w.v + first * kBlockSize); });
}

}  // namespace
}  // namespace kestrel::cpu::kda
