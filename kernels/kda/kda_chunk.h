// KDA over one chunk of one chain: up to 64 consecutive tokens of one document, in four tiles of 16.
//
// Names follow the README's derivation.  Inside a chunk, with a_t = e^{g_t} the decay of token t and products of decays
// per key channel:
//   D(i,j) = a_{j+1} ... a_i            from just after token j to just after token i   (j <= i; D(i,i) = 1)
//   k_in_i  = k_i a_0 ... a_i           q_in likewise: meets the state that entered the chunk
//   k_out_j = k_j D(last, j)            what token j writes, as it leaves the chunk
//   Aqk_ij = <q_i, k_j D(i,j)> (j <= i),   Akk_ij = <k_i, k_j D(i,j)> (j < i)
//   e = V - K_in S - Akk U,   U = beta e      (solved forward, token by token)
//   O = Q_in S + Aqk U,       S <- diag(a_0 ... a_last) S + K_out^T U
// Every decay is a product of numbers in [0, 1]: nothing overflows for any gate, and no number looks at a later token.
#pragma once

#include "kernels/kda/kda_chain.h"

namespace kestrel::cpu::kda {

constexpr int64_t kChunk = 64;
constexpr int64_t kTile = 16;
constexpr int64_t kTiles = kChunk / kTile;

// Tokens [begin, end) of the chain.  A document is cut into chunks from its first token on, so its chunks (and all
// bits that follow) are the same wherever it lies in a row.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  int64_t tiles() const { return (size() + kTile - 1) / kTile; }
  int64_t padded() const { return tiles() * kTile; }
};
Span chunk_from(const ChainInputs& in, int64_t begin, int64_t T);
Span chunk_before(const ChainInputs& in, int64_t end);

// Scratch of one chunk; K and V are padded to multiples of 8 with zeros (decays with ones), rows past the chunk's end
// to a multiple of 16 with zero q, k, v, beta and decay one: they change nothing.
struct ChunkWork {
  int64_t K, V;                   // padded
  float *q, *k, *v;               // [64,K] normalised, q times K^-1/2; [64,K]; [64,V]
  float* decay;                   // [64,K] a
  float *beta, *q_norm, *k_norm;  // [64]; reciprocal norms
  float* row_decay;               // [64,K] product of the decays from the start of the token's tile to the token
  float* tile_decay;              // [4,K] ... over a whole tile
  float* entry_decay;             // [5,K] ... from the start of the chunk to the start of the tile; [tiles]: all
  float *q_rows, *k_rows;         // [64,K] q, k times row_decay
  float *q_in, *k_in;             // [64,K]
  float* k_tile;                  // [64,K] keys decayed to the end of their own tile
  float* k_out_t;    // [K,64] keys decayed to the end of the last tile reached, transposed: at last K_out^T
  float *Aqk, *Akk;  // [64,64], zero above the diagonal inside a diagonal tile; tiles right of it unused
  float *e, *u;      // [64,V] prediction errors; what is written
  float* o;          // [64,V]
  float* state;      // [K,V]
  // backward
  float *d_o, *d_u, *d_e;                // [64,V]
  float* u_t;                            // [V,64]
  float *d_Aqk, *d_Akk;                  // [64,64]
  float *d_q_rows, *d_k_rows;            // [64,K] gradients of q and k as rows (the later token of a pair)
  float* d_k_out;                        // [64,K] gradient of the keys as columns (the earlier token of a pair)
  float* keys;                           // [64,K] keys decayed to the start of a tile
  float* d_decay_end;                    // [K] gradient of the log decay of the chunk as a whole
  float *d_state, *d_state_t, *state_t;  // [K,V]; [V,K]; [V,K]
  float *d_g, *d_bias;                   // [K]
  float* row;                            // [K] one row of a gradient before it goes through the norm
};

int64_t chunk_work_elements(const KdaDims& d, bool backward);
ChunkWork chunk_work(const KdaDims& d, bool backward, float* memory);

// state <- the [K,V] state at the entry of a chunk (nullptr: zero), and back, between the padded and the plain layout.
void load_state(const KdaDims& d, ChunkWork& w, float* padded, const float* plain);
void store_state(const KdaDims& d, const ChunkWork& w, const float* padded, float* plain);

// Everything up to e and u, from w.state.  `ahead`: how far from these the tokens lie that come next (a hint).
void chunk_errors(const KdaDims& d, const ChainInputs& in, Span span, int64_t ahead, ChunkWork& w);
// Then the outputs (o rows of the chain), and the state that leaves.
void chunk_outputs(const KdaDims& d, Span span, ChunkWork& w, Rows o);
void chunk_advance(Span span, ChunkWork& w);

// Gradients of one chunk, after chunk_errors with w.state the entering state.  w.d_state is the gradient of the leaving
// state on entry and of the entering state on return.
void chunk_backward(const KdaDims& d, const ChainInputs& in, Span span, ChunkWork& w, Rows d_o,
                    const ChainGrads& grads);

}  // namespace kestrel::cpu::kda
