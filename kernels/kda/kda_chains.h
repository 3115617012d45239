// Whole chains, forward and backward, for vectors of W floats.  This header and those it includes hold all of the
// arithmetic; they are compiled once per instruction set, by kda_chains_base.cpp and kda_chains_avx512.cpp, and
// everything in them is in an unnamed namespace.
#pragma once

#include "kernels/kda/kda_chunk_backward.h"

namespace kestrel::cpu::kda {
namespace {

template <int W>
inline void keep(const KdaDims& d, Span span, const Chunk& x, const Saved& saved) {
  store_rows<W>(x.e, span, d.V, saved.e);
  for (int64_t i = 0; i < span.size(); ++i) {
    for (int64_t l = 0; l < kBlock; l += W) {
      store<W>(saved.A[span.begin + i] + l, load<W>(x.Aqk + i * kBlock + l));
      store<W>(saved.A[span.begin + i] + kBlock + l, load<W>(x.Akk + i * kBlock + l));
    }
  }
}

inline void set_bias(const KdaDims& d, const ChainInputs& in, ChunkWork& w) {
  for (int64_t c = 0; c < w.K; ++c) w.bias[c] = c < d.K ? in.g.bias[c] : 0.f;
}

// What the next chunk reads, and what this one will write.
inline void forward_ahead(const KdaDims& d, const ChainInputs& in, Span span, Rows o, const Saved* saved,
                          ChunkWork& w) {
  const int64_t begin = span.end, end = begin + kChunk;
  w.ahead.start(w.V * (w.K / 4 + 8) / 64);
  for (const Rows& rows : {in.q, in.k, in.gate}) w.ahead.add(rows, begin, end, d.T, d.K, false);
  w.ahead.add(in.v, begin, end, d.T, d.V, false);
  w.ahead.add(o, begin, end, d.T, d.V, true);
  if (saved == nullptr) return;
  w.ahead.add(saved->e, begin, end, d.T, d.V, true);
  w.ahead.add(saved->A, begin, end, d.T, 2 * kBlock, true);
}

// What the segment before reads (as much of it as this chunk is of its own), and what the chunk before will write.
inline void backward_ahead(const KdaDims& d, const ChainInputs& in, Span span, const Saved& saved, Rows d_o,
                           const ChainGrads& g, ChunkWork& w) {
  w.ahead.start(w.V / 16 + 2 + w.K * (12 + w.V / 4) / 64 + w.K / 16);
  const int64_t begin = span.begin - kSegment, end = begin + kChunk;
  for (const Rows& rows : {in.q, in.k, in.gate}) w.ahead.add(rows, begin, end, d.T, d.K, false);
  w.ahead.add(saved.e, begin, end, d.T, d.V, false);
  w.ahead.add(saved.A, begin, end, d.T, 2 * kBlock, false);
  const int64_t before = span.begin - kChunk;
  w.ahead.add(d_o, before, span.begin, d.T, d.V, false);
  for (const Rows& rows : {g.dq, g.dk, g.dgate}) w.ahead.add(rows, before, span.begin, d.T, d.K, true);
  w.ahead.add(g.dv, before, span.begin, d.T, d.V, true);
}

template <int W>
void forward_chain(const KdaDims& d, const ChainInputs& in, ChunkWork& w, Rows o, float* final_state,
                   const Saved* saved) {
  set_bias(d, in, w);
  load_state<W>(d, in.initial_state, w);
  Chunk& x = w.chunks[0];
  for (int64_t t = 0; t < d.T;) {
    const Span span = chunk_from(in, t, d.T);
    if (restarts(in, t)) load_state<W>(d, nullptr, w);
    const int64_t position = t - document_of(in, t);
    if (saved != nullptr && position > 0 && position % kSegment == 0) store_state<W>(d, w, saved->state_before(t, d));
    forward_ahead(d, in, span, o, saved, w);
    chunk_forward<W>(d, in, span, w, x);
    if (saved != nullptr) keep<W>(d, span, x, *saved);
    store_rows<W>(w.v, span, d.V, o);
    t = span.end;
  }
  if (final_state != nullptr) store_state<W>(d, w, final_state);
}

// The state that enters a segment.
inline const float* entry_state(const KdaDims& d, const ChainInputs& in, int64_t begin, const Saved& saved) {
  if (begin == 0) return in.initial_state;
  return restarts(in, begin) ? nullptr : saved.state_before(begin, d);
}

template <int W>
void backward_chain(const KdaDims& d, const ChainInputs& in, ChunkWork& w, const Saved& saved, Rows d_o,
                    const float* d_final_state, const ChainGrads& g) {
  set_bias(d, in, w);
  *g.d_A_log = 0.f;
  for (int64_t c = 0; c < w.K; ++c) w.d_bias[c] = 0.f;
  load_state_t<W>(d, d_final_state, w, w.d_state_t);
  for (int64_t end = d.T; end > 0;) {
    const Span segment = segment_before(in, end);
    const int64_t chunks = (segment.size() + kChunk - 1) / kChunk;
    const auto span = [&](int64_t n) {
      const int64_t begin = segment.begin + n * kChunk;
      return Span{begin, begin + kChunk < segment.end ? begin + kChunk : segment.end};
    };
    load_state_t<W>(d, entry_state(d, in, segment.begin, saved), w, w.chunks[0].state_t);
    for (int64_t n = 0; n < chunks; ++n) {
      chunk_recall<W>(d, in, span(n), saved, w, w.chunks[n]);
      if (n + 1 < chunks) advance_state_t<W>(w, w.chunks[n], w.chunks[n + 1].state_t);
    }
    for (int64_t n = chunks - 1; n >= 0; --n) {
      backward_ahead(d, in, span(n), saved, d_o, g, w);
      chunk_backward<W>(d, in, span(n), w, w.chunks[n], d_o, g);
    }
    if (restarts(in, segment.begin)) load_state_t<W>(d, nullptr, w, w.d_state_t);
    end = segment.begin;
  }
  for (int64_t c = 0; c < d.K; ++c) g.d_dt_bias[c] = w.d_bias[c];
  if (g.d_initial_state != nullptr) store_state_t(d, w, w.d_state_t, g.d_initial_state);
}

}  // namespace
}  // namespace kestrel::cpu::kda
