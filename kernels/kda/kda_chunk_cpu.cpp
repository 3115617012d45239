// The chunk form, forward.
#include <algorithm>

#include "kernels/kda/kda_chunk.h"
#include "kernels/kda/kda_products.h"

namespace kestrel::cpu::kda {
namespace {

constexpr int64_t kCacheLine = 16;  // floats

int64_t pad(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// Hands out pieces of `memory`; with no memory it only counts.
struct Carver {
  float* memory;
  int64_t used = 0;
  float* operator()(int64_t n) {
    float* p = memory == nullptr ? nullptr : memory + used;
    used += (n + 15) / 16 * 16;
    return p;
  }
};

ChunkWork carve(const KdaDims& d, bool backward, Carver& take) {
  const int64_t K = pad(d.K), V = pad(d.V), rows_k = kChunk * K, rows_v = kChunk * V, square = kChunk * kChunk;
  ChunkWork w{};
  w.K = K, w.V = V;
  for (float** p : {&w.q, &w.k, &w.decay, &w.row_decay, &w.q_rows, &w.k_rows, &w.q_in, &w.k_in, &w.k_tile, &w.k_out_t})
    *p = take(rows_k);
  for (float** p : {&w.v, &w.e, &w.u, &w.o}) *p = take(rows_v);
  for (float** p : {&w.beta, &w.q_norm, &w.k_norm}) *p = take(kChunk);
  for (float** p : {&w.Aqk, &w.Akk}) *p = take(square);
  w.tile_decay = take(kTiles * K);
  w.entry_decay = take((kTiles + 1) * K);
  w.state = take(K * V);
  if (!backward) return w;
  for (float** p : {&w.d_q_rows, &w.d_k_rows, &w.d_k_out, &w.keys}) *p = take(rows_k);
  for (float** p : {&w.d_o, &w.d_u, &w.d_e, &w.u_t}) *p = take(rows_v);
  for (float** p : {&w.d_Aqk, &w.d_Akk}) *p = take(square);
  for (float** p : {&w.d_state, &w.d_state_t, &w.state_t}) *p = take(K * V);
  for (float** p : {&w.d_decay_end, &w.d_g, &w.d_bias, &w.row}) *p = take(K);
  return w;
}

// A row of n values into `width` columns, the rest filled.
void load_row(const float* from, int64_t n, float* to, int64_t width, float scale, float fill) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] * scale;
  std::fill(to + n, to + width, fill);
}

void load_tokens(const KdaDims& d, const ChainInputs& in, Span span, int64_t ahead, ChunkWork& w) {
  const float scale = 1.f / std::sqrt(static_cast<float>(d.K));
  for (int64_t i = 0; i < span.size(); ++i) {
    const int64_t t = span.begin + i;
    const int64_t later = std::clamp<int64_t>(t + ahead, 0, d.T - 1);
    // Rows of the next chunk start on their way into the cache: a head's rows lie far apart, and the hardware does not
    // foresee them.  (In a function of its own the compiler takes this for no effect and drops it.)
    for (int64_t c = 0; c < d.K; c += kCacheLine) {
      __builtin_prefetch(in.q[later] + c);
      __builtin_prefetch(in.k[later] + c);
      __builtin_prefetch(in.gate[later] + c);
    }
    for (int64_t c = 0; c < d.V; c += kCacheLine) __builtin_prefetch(in.v[later] + c);
    w.q_norm[i] = reciprocal_norm(in.q[t], d.K);
    w.k_norm[i] = reciprocal_norm(in.k[t], d.K);
    load_row(in.q[t], d.K, w.q + i * w.K, w.K, scale * w.q_norm[i], 0.f);
    load_row(in.k[t], d.K, w.k + i * w.K, w.K, w.k_norm[i], 0.f);
    load_row(in.v[t], d.V, w.v + i * w.V, w.V, 1.f, 0.f);
    decay_forward(in.g, in.gate[t], d.K, w.decay + i * w.K);
    std::fill(w.decay + i * w.K + d.K, w.decay + (i + 1) * w.K, 1.f);
    w.beta[i] = sigmoid_f(in.beta[t][0]);
  }
  const int64_t n = span.size(), end = span.padded();
  std::fill(w.q + n * w.K, w.q + end * w.K, 0.f);
  std::fill(w.k + n * w.K, w.k + end * w.K, 0.f);
  std::fill(w.v + n * w.V, w.v + end * w.V, 0.f);
  std::fill(w.decay + n * w.K, w.decay + end * w.K, 1.f);
  std::fill(w.beta + n, w.beta + end, 0.f);
}

// row_decay, tile_decay, entry_decay, and q and k times them.
void running_decays(Span span, ChunkWork& w) {
  const int64_t K = w.K;
  std::fill(w.entry_decay, w.entry_decay + K, 1.f);
  for (int64_t tile = 0; tile < span.tiles(); ++tile) {
    float* running = w.tile_decay + tile * K;
    const float* entry = w.entry_decay + tile * K;
    std::fill(running, running + K, 1.f);
    for (int64_t r = tile * kTile * K; r < (tile + 1) * kTile * K; r += K) {
      for (int64_t c = 0; c < K; c += kLanes) {
        const Lanes decay = lanes_at(running + c) * lanes_at(w.decay + r + c);
        const Lanes q = lanes_at(w.q + r + c) * decay, k = lanes_at(w.k + r + c) * decay;
        lanes_at(running + c) = decay;
        lanes_at(w.row_decay + r + c) = decay;
        lanes_at(w.q_rows + r + c) = q;
        lanes_at(w.k_rows + r + c) = k;
        lanes_at(w.q_in + r + c) = q * lanes_at(entry + c);
        lanes_at(w.k_in + r + c) = k * lanes_at(entry + c);
      }
    }
    for (int64_t c = 0; c < K; ++c) w.entry_decay[(tile + 1) * K + c] = entry[c] * running[c];
  }
}

// Scores of a tile's tokens against all earlier tiles: k_out_t holds those keys decayed to the start of this tile.
void scores_before_tile(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  if (first == 0) return;
  multiply(Into::set, kTile, first, K, plain(w.q_rows + first * K, K), w.k_out_t, kChunk, w.Aqk + first * kChunk,
           kChunk);
  multiply(Into::set, kTile, first, K, plain(w.k_rows + first * K, K), w.k_out_t, kChunk, w.Akk + first * kChunk,
           kChunk);
}

float dot(const float* a, const float* b, int64_t n) {
  Lanes sum = {};
  for (int64_t i = 0; i < n; i += kLanes) sum += lanes_at(a + i) * lanes_at(b + i);
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// key *= decay, then its scores with q and k.
void decay_and_score(float* key, const float* decay, const float* q, const float* k, int64_t K, float& qk, float& kk) {
  Lanes sum_q = {}, sum_k = {};
  for (int64_t c = 0; c < K; c += kLanes) {
    const Lanes x = lanes_at(key + c) * lanes_at(decay + c);
    lanes_at(key + c) = x;
    sum_q += lanes_at(q + c) * x;
    sum_k += lanes_at(k + c) * x;
  }
  const Lanes both = __builtin_shuffle(sum_q, sum_k, (__typeof__(sum_q < sum_k)){0, 1, 2, 3, 8, 9, 10, 11}) +
                     __builtin_shuffle(sum_q, sum_k, (__typeof__(sum_q < sum_k)){4, 5, 6, 7, 12, 13, 14, 15});
  qk = (both[0] + both[1]) + (both[2] + both[3]);
  kk = (both[4] + both[5]) + (both[6] + both[7]);
}

// Scores inside a tile, pair by pair: the keys are carried along, decayed token by token.
void scores_inside_tile(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  for (int64_t i = first; i < first + kTile; ++i) {
    const float *q = w.q + i * K, *k = w.k + i * K;
    float *Aqk = w.Aqk + i * kChunk, *Akk = w.Akk + i * kChunk;
    for (int64_t j = first; j < i; ++j) decay_and_score(w.k_tile + j * K, w.decay + i * K, q, k, K, Aqk[j], Akk[j]);
    std::copy(k, k + K, w.k_tile + i * K);
    Aqk[i] = dot(q, k, K);
    Akk[i] = 0.f;
    std::fill(Aqk + i + 1, Aqk + first + kTile, 0.f);
    std::fill(Akk + i + 1, Akk + first + kTile, 0.f);
  }
}

// Carries the keys over the tile: earlier ones decay by it, its own join.
void carry_keys(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  const float* decay = w.tile_decay + tile * K;
  for (int64_t c = 0; c < K; ++c) {
    for (int64_t j = 0; j < first; ++j) w.k_out_t[c * kChunk + j] *= decay[c];
  }
  transpose(kTile, K, w.k_tile + first * K, K, w.k_out_t + first, kChunk);
}

// Inside one tile: e_i -= sum_{j<i} Akk_ij u_j;  u_i = beta_i e_i.
template <int kWide>
void solve_strip(const float* Akk, const float* beta, float* e, float* u, int64_t ld) {
  for (int64_t i = 0; i < kTile; ++i) {
    Lanes x[kWide];
    for (int c = 0; c < kWide; ++c) x[c] = lanes_at(e + i * ld + c * kLanes);
    for (int64_t j = 0; j < i; ++j) {
      for (int c = 0; c < kWide; ++c) x[c] -= Akk[i * kChunk + j] * lanes_at(u + j * ld + c * kLanes);
    }
    for (int c = 0; c < kWide; ++c) {
      lanes_at(e + i * ld + c * kLanes) = x[c];
      lanes_at(u + i * ld + c * kLanes) = beta[i] * x[c];
    }
  }
}

void solve_tile(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, V = w.V;
  const float* Akk = w.Akk + first * kChunk + first;
  float *e = w.e + first * V, *u = w.u + first * V;
  int64_t c = 0;
  for (; c + 4 * kLanes <= V; c += 4 * kLanes) solve_strip<4>(Akk, w.beta + first, e + c, u + c, V);
  for (; c < V; c += kLanes) solve_strip<1>(Akk, w.beta + first, e + c, u + c, V);
}

// e = V - K_in S - Akk U, U = beta e: block forward substitution.
void solve_errors(Span span, ChunkWork& w) {
  const int64_t V = w.V;
  std::copy(w.v, w.v + span.padded() * V, w.e);
  multiply(Into::subtract, span.padded(), V, w.K, plain(w.k_in, w.K), w.state, V, w.e, V);
  for (int64_t tile = 0; tile < span.tiles(); ++tile) {
    const int64_t first = tile * kTile;
    multiply(Into::subtract, kTile, V, first, plain(w.Akk + first * kChunk, kChunk), w.u, V, w.e + first * V, V);
    solve_tile(tile, w);
  }
}

}  // namespace

Span chunk_from(const ChainInputs& in, int64_t begin, int64_t T) {
  int64_t end = begin + 1;
  while (end < T && end < begin + kChunk && !restarts(in, end)) ++end;
  return {begin, end};
}

Span chunk_before(const ChainInputs& in, int64_t end) {
  const int64_t document = in.document_start == nullptr ? 0 : in.document_start[end - 1];
  return {document + (end - 1 - document) / kChunk * kChunk, end};
}

int64_t chunk_work_elements(const KdaDims& d, bool backward) {
  Carver count{nullptr};
  carve(d, backward, count);
  return count.used;
}

ChunkWork chunk_work(const KdaDims& d, bool backward, float* memory) {
  Carver take{memory};
  return carve(d, backward, take);
}

void load_state(const KdaDims& d, ChunkWork& w, float* padded, const float* plain_state) {
  std::fill(padded, padded + w.K * w.V, 0.f);
  if (plain_state == nullptr) return;
  for (int64_t i = 0; i < d.K; ++i) std::copy(plain_state + i * d.V, plain_state + (i + 1) * d.V, padded + i * w.V);
}

void store_state(const KdaDims& d, const ChunkWork& w, const float* padded, float* plain_state) {
  for (int64_t i = 0; i < d.K; ++i) std::copy(padded + i * w.V, padded + i * w.V + d.V, plain_state + i * d.V);
}

void chunk_errors(const KdaDims& d, const ChainInputs& in, Span span, int64_t ahead, ChunkWork& w) {
  load_tokens(d, in, span, ahead, w);
  running_decays(span, w);
  for (int64_t tile = 0; tile < span.tiles(); ++tile) {
    scores_before_tile(tile, w);
    scores_inside_tile(tile, w);
    carry_keys(tile, w);
  }
  solve_errors(span, w);
}

void chunk_outputs(const KdaDims& d, Span span, ChunkWork& w, Rows o) {
  const int64_t V = w.V;
  multiply(Into::set, span.padded(), V, w.K, plain(w.q_in, w.K), w.state, V, w.o, V);
  for (int64_t first = 0; first < span.padded(); first += kTile) {
    multiply(Into::add, kTile, V, first + kTile, plain(w.Aqk + first * kChunk, kChunk), w.u, V, w.o + first * V, V);
  }
  for (int64_t i = 0; i < span.size(); ++i) std::copy(w.o + i * V, w.o + i * V + d.V, o[span.begin + i]);
}

void chunk_advance(Span span, ChunkWork& w) {
  const float* decay = w.entry_decay + span.tiles() * w.K;
  for (int64_t i = 0; i < w.K; ++i) {
    for (int64_t j = 0; j < w.V; ++j) w.state[i * w.V + j] *= decay[i];
  }
  multiply(Into::add, w.K, w.V, span.padded(), plain(w.k_out_t, kChunk), w.u, w.V, w.state, w.V);
}

}  // namespace kestrel::cpu::kda
