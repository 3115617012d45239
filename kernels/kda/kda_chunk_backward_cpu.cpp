// The chunk form, backward: the products of kda_chunk_cpu.cpp differentiated one after another, last to first.
#include <algorithm>

#include "kernels/kda/kda_chunk.h"
#include "kernels/kda/kda_products.h"

namespace kestrel::cpu::kda {
namespace {

void load_d_o(const KdaDims& d, Span span, ChunkWork& w, Rows d_o) {
  std::fill(w.d_o, w.d_o + span.padded() * w.V, 0.f);
  for (int64_t i = 0; i < span.size(); ++i) {
    const float* row = d_o[span.begin + i];
    std::copy(row, row + d.V, w.d_o + i * w.V);
  }
}

// dU = Aqk^T dO + K_out dS': what the outputs and the leaving state ask of what was written.
void d_written(Span span, ChunkWork& w) {
  const int64_t V = w.V, rows = span.padded();
  multiply(Into::set, rows, V, w.K, transposed(w.k_out_t, kChunk), w.d_state, V, w.d_u, V);
  for (int64_t first = 0; first < rows; first += kTile) {
    multiply(Into::add, kTile, V, rows - first, transposed(w.Aqk + first * kChunk + first, kChunk), w.d_o + first * V,
             V, w.d_u + first * V, V);
  }
}

// Inside one tile, last token first: dU_i -= sum_{j>i} Akk_ji dE_j;  dE_i = beta_i dU_i.
template <int kWide>
void solve_strip_backward(const float* Akk, const float* beta, float* d_u, float* d_e, int64_t ld) {
  for (int64_t i = kTile - 1; i >= 0; --i) {
    Lanes x[kWide];
    for (int c = 0; c < kWide; ++c) x[c] = lanes_at(d_u + i * ld + c * kLanes);
    for (int64_t j = i + 1; j < kTile; ++j) {
      for (int c = 0; c < kWide; ++c) x[c] -= Akk[j * kChunk + i] * lanes_at(d_e + j * ld + c * kLanes);
    }
    for (int c = 0; c < kWide; ++c) {
      lanes_at(d_u + i * ld + c * kLanes) = x[c];
      lanes_at(d_e + i * ld + c * kLanes) = beta[i] * x[c];
    }
  }
}

void solve_tile_backward(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, V = w.V;
  const float* Akk = w.Akk + first * kChunk + first;
  float *d_u = w.d_u + first * V, *d_e = w.d_e + first * V;
  int64_t c = 0;
  for (; c + 4 * kLanes <= V; c += 4 * kLanes) solve_strip_backward<4>(Akk, w.beta + first, d_u + c, d_e + c, V);
  for (; c < V; c += kLanes) solve_strip_backward<1>(Akk, w.beta + first, d_u + c, d_e + c, V);
}

// The transposed system of solve_errors, by block backward substitution: afterwards d_u holds the whole gradient of U
// and d_e that of e (which is also dV).
void solve_errors_backward(Span span, ChunkWork& w) {
  const int64_t V = w.V;
  for (int64_t tile = span.tiles() - 1; tile >= 0; --tile) {
    const int64_t first = tile * kTile, next = first + kTile;
    multiply(Into::subtract, kTile, V, span.padded() - next, transposed(w.Akk + next * kChunk + first, kChunk),
             w.d_e + next * V, V, w.d_u + first * V, V);
    solve_tile_backward(tile, w);
  }
}

// dAqk = dO U^T and dAkk = -dE U^T, tiles up to the diagonal one (the readers keep to the triangle inside it).
void d_scores(Span span, ChunkWork& w) {
  const int64_t V = w.V;
  transpose(span.padded(), V, w.u, V, w.u_t, kChunk);
  for (int64_t first = 0; first < span.padded(); first += kTile) {
    multiply(Into::set, kTile, first + kTile, V, plain(w.d_o + first * V, V), w.u_t, kChunk, w.d_Aqk + first * kChunk,
             kChunk);
    multiply(Into::negate, kTile, first + kTile, V, plain(w.d_e + first * V, V), w.u_t, kChunk,
             w.d_Akk + first * kChunk, kChunk);
  }
}

// Gradients through the products with the state: of Q_in, K_in (still without their decays) and K_out.
void d_state_products(Span span, ChunkWork& w) {
  const int64_t K = w.K, V = w.V, rows = span.padded();
  transpose(K, V, w.state, V, w.state_t, K);
  transpose(K, V, w.d_state, V, w.d_state_t, K);
  multiply(Into::set, rows, K, V, plain(w.d_o, V), w.state_t, K, w.d_q_rows, K);
  multiply(Into::negate, rows, K, V, plain(w.d_e, V), w.state_t, K, w.d_k_rows, K);
  multiply(Into::set, rows, K, V, plain(w.u, V), w.d_state_t, K, w.d_k_out, K);
  for (int64_t i = 0; i < rows; ++i) {
    const float* entry = w.entry_decay + i / kTile * K;
    for (int64_t c = 0; c < K; ++c) {
      w.d_q_rows[i * K + c] *= entry[c];
      w.d_k_rows[i * K + c] *= entry[c];
    }
  }
}

// w.keys = keys of all tiles before `tile`, decayed to its start.
void keys_at_start(int64_t tile, ChunkWork& w) {
  const int64_t K = w.K;
  float* decay = w.row;
  std::fill(decay, decay + K, 1.f);
  for (int64_t past = tile - 1; past >= 0; --past) {
    for (int64_t j = past * kTile; j < (past + 1) * kTile; ++j) {
      for (int64_t c = 0; c < K; ++c) w.keys[j * K + c] = w.k_tile[j * K + c] * decay[c];
    }
    for (int64_t c = 0; c < K; ++c) decay[c] *= w.tile_decay[past * K + c];
  }
}

// The gradient of the log decay of the chunk as a whole:  a_all . rowsum(S . dS') + sum_j k_out_j . dK_out_j.
// The last token's own write is not decayed by anything, so it has no part in it.
void d_whole_decay(Span span, ChunkWork& w) {
  const int64_t K = w.K, V = w.V;
  const float* decay = w.entry_decay + span.tiles() * K;
  for (int64_t c = 0; c < K; ++c) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < V; ++j) sum += w.state[c * V + j] * w.d_state[c * V + j];
    w.d_decay_end[c] = decay[c] * sum;
  }
  keys_at_start(span.tiles(), w);
  for (int64_t j = 0; j + 1 < span.size(); ++j) {
    for (int64_t c = 0; c < K; ++c) w.d_decay_end[c] += w.keys[j * K + c] * w.d_k_out[j * K + c];
  }
}

// dS = a_all dS' + Q_in^T dO - K_in^T dE
void d_state_before(Span span, ChunkWork& w) {
  const int64_t K = w.K, V = w.V;
  const float* decay = w.entry_decay + span.tiles() * K;
  for (int64_t c = 0; c < K; ++c) {
    for (int64_t j = 0; j < V; ++j) w.d_state[c * V + j] *= decay[c];
  }
  multiply(Into::add, K, V, span.padded(), transposed(w.q_in, K), w.d_o, V, w.d_state, V);
  multiply(Into::subtract, K, V, span.padded(), transposed(w.k_in, K), w.d_e, V, w.d_state, V);
}

// Pairs of a token in this tile with one in an earlier tile.
void pairs_before_tile(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  const float *Aqk = w.d_Aqk + first * kChunk, *Akk = w.d_Akk + first * kChunk;
  keys_at_start(tile, w);
  multiply(Into::add, kTile, K, first, plain(Aqk, kChunk), w.keys, K, w.d_q_rows + first * K, K);
  multiply(Into::add, kTile, K, first, plain(Akk, kChunk), w.keys, K, w.d_k_rows + first * K, K);
  for (int64_t i = 0; i < kTile * K; ++i) {
    w.d_q_rows[first * K + i] *= w.row_decay[first * K + i];
    w.d_k_rows[first * K + i] *= w.row_decay[first * K + i];
  }
  const float* decay = w.tile_decay + tile * K;
  for (int64_t j = 0; j < first; ++j) {  // d_k_out of earlier tiles: from the end of this tile to its start
    for (int64_t c = 0; c < K; ++c) w.d_k_out[j * K + c] *= decay[c];
  }
  multiply(Into::add, first, K, kTile, transposed(Aqk, kChunk), w.q_rows + first * K, K, w.d_k_out, K);
  multiply(Into::add, first, K, kTile, transposed(Akk, kChunk), w.k_rows + first * K, K, w.d_k_out, K);
}

// Pairs i > j inside a tile.  The later token: keys carried forward, decayed token by token, as in the forward.
void pairs_inside_tile_rows(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  for (int64_t i = first; i < first + kTile; ++i) {
    const float *decay = w.decay + i * K, *Aqk = w.d_Aqk + i * kChunk, *Akk = w.d_Akk + i * kChunk;
    float *d_q = w.d_q_rows + i * K, *d_k = w.d_k_rows + i * K;
    for (int64_t j = first; j < i; ++j) {
      float* key = w.keys + j * K;
      for (int64_t c = 0; c < K; c += kLanes) {
        const Lanes x = lanes_at(key + c) * lanes_at(decay + c);
        lanes_at(key + c) = x;
        lanes_at(d_q + c) += Aqk[j] * x;
        lanes_at(d_k + c) += Akk[j] * x;
      }
    }
    std::copy(w.k + i * K, w.k + (i + 1) * K, w.keys + i * K);
  }
}

// The earlier token: its gradient starts at the end of the tile and walks back to the token, collecting and decaying.
void pairs_inside_tile_columns(int64_t tile, ChunkWork& w) {
  const int64_t first = tile * kTile, K = w.K;
  for (int64_t j = first; j < first + kTile; ++j) {
    for (int64_t c = 0; c < K; c += kLanes) {
      Lanes x = lanes_at(w.d_k_out + j * K + c);
      for (int64_t i = first + kTile - 1; i > j; --i) {
        x += w.d_Aqk[i * kChunk + j] * lanes_at(w.q + i * K + c);
        x += w.d_Akk[i * kChunk + j] * lanes_at(w.k + i * K + c);
        x *= lanes_at(w.decay + i * K + c);
      }
      lanes_at(w.d_k_out + j * K + c) = x;
    }
  }
}

// d_g <- the gradient of token i's log decay, given that of token i + 1.  A token's own pair (i, i) has no decay and
// stays out; so does the last token's write.
void step_d_g(Span span, int64_t i, ChunkWork& w) {
  const int64_t r = i * w.K;
  const float write = i + 1 == span.size() ? 0.f : 1.f;
  for (int64_t c = 0; c < w.K; ++c) {
    w.d_g[c] += w.q[r + c] * w.d_q_rows[r + c] + w.k[r + c] * (w.d_k_rows[r + c] - write * w.d_k_out[r + c]);
  }
}

void store_row(const KdaDims& d, const ChainInputs& in, int64_t t, int64_t i, ChunkWork& w, const ChainGrads& g) {
  const int64_t r = i * w.K;
  const float own = w.d_Aqk[i * kChunk + i];
  for (int64_t c = 0; c < d.K; ++c) w.row[c] = w.d_q_rows[r + c] + own * w.k[r + c];
  norm_backward(in.q[t], w.q_norm[i], 1.f / std::sqrt(static_cast<float>(d.K)), w.row, d.K, g.dq[t]);
  for (int64_t c = 0; c < d.K; ++c) w.row[c] = w.d_k_rows[r + c] + w.d_k_out[r + c] + own * w.q[r + c];
  norm_backward(in.k[t], w.k_norm[i], 1.f, w.row, d.K, g.dk[t]);
  std::copy(w.d_e + i * w.V, w.d_e + i * w.V + d.V, g.dv[t]);
  float d_beta = 0;
#pragma omp simd reduction(+ : d_beta)
  for (int64_t c = 0; c < d.V; ++c) d_beta += w.d_u[i * w.V + c] * w.e[i * w.V + c];
  const float logit = in.beta[t][0];
  g.dbeta[t][0] = d_beta * sigmoid_f(logit) * sigmoid_f(-logit);
}

void store_gradients(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, const ChainGrads& g) {
  std::copy(w.d_decay_end, w.d_decay_end + w.K, w.d_g);
  std::fill(w.d_bias, w.d_bias + w.K, 0.f);
  float d_A_log = 0;
  for (int64_t i = span.size() - 1; i >= 0; --i) {
    const int64_t t = span.begin + i;
    step_d_g(span, i, w);
    d_A_log += decay_backward(in.g, in.gate[t], w.d_g, d.K, g.dgate[t], w.d_bias);
    store_row(d, in, t, i, w, g);
  }
  for (int64_t c = 0; c < d.K; ++c) g.d_dt_bias[c] += w.d_bias[c];
  *g.d_A_log += d_A_log;
}

}  // namespace

void chunk_backward(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, Rows d_o,
                    const ChainGrads& grads) {
  load_d_o(d, span, w, d_o);
  d_written(span, w);
  solve_errors_backward(span, w);
  d_scores(span, w);
  d_state_products(span, w);
  d_whole_decay(span, w);
  d_state_before(span, w);
  for (int64_t tile = span.tiles() - 1; tile >= 0; --tile) {
    pairs_before_tile(tile, w);
    pairs_inside_tile_rows(tile, w);
    pairs_inside_tile_columns(tile, w);
  }
  store_gradients(d, in, span, w, grads);
}

}  // namespace kestrel::cpu::kda
