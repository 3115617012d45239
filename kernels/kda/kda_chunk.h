// KDA over one chunk of one chain: up to 16 consecutive tokens of one document.
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
#include "kernels/kda/kda_prefetch.h"

namespace kestrel::cpu::kda {

constexpr int64_t kChunk = 16;
// Forward keeps a state every so many tokens of a document; backward walks the chunks of one such segment together.
constexpr int64_t kSegment = 64;
constexpr int64_t kChunksPerSegment = kSegment / kChunk;

// Tokens [begin, end) of the chain.  A document is cut into segments and chunks from its first token on, so its chunks
// (and all bits that follow) are the same wherever it lies in a row.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
int64_t document_of(const ChainInputs& in, int64_t t);  // the first token of t's document
Span chunk_from(const ChainInputs& in, int64_t begin, int64_t T);
Span segment_before(const ChainInputs& in, int64_t end);

// Scratch of one chunk.  K and V are padded to multiples of 16 by zeros, tokens past the end of a chunk by zero q, k,
// v, beta and decay one: they change nothing.  [16,K] stands for K/16 blocks of 16 tokens by 16 channels; [K,16] for
// K/16 blocks the other way round; a state is V/16 panels [K,16], and its transpose K/16 panels [V,16].
struct Chunk {
  float *q, *k;            // [16,K] normalised, q times K^-1/2
  float* decay;            // [16,K] a
  float *q_in, *k_in;      // [16,K]
  float* k_out_t;          // [K,16] K_out^T
  float* decay_all;        // [K] a_0 ... a_last
  float *Aqk, *Akk;        // [16,16] zero above the diagonal (Akk: and on it)
  float *e, *u;            // [16,V] prediction errors; what is written
  float* beta;             // [16]
  float *q_norm, *k_norm;  // [16] reciprocal norms
  // backward
  float* decay_in;              // [16,K] a_0 ... a_i
  float* k_out;                 // [16,K]
  float *gate_slope, *A_slope;  // [16,K] dg / dgate, dg / dA_log
  float* state_t;               // S^T at the entry of the chunk
};

// Scratch of a worker: forward works in chunks[0], backward in all chunks of a segment.
struct ChunkWork {
  Prefetcher ahead;
  int64_t K, V;  // padded
  Chunk chunks[kChunksPerSegment];
  float* bias;                         // [K]
  float *rows_q, *rows_k, *rows_gate;  // [16,K] row-major: padded rows, where K is no multiple of 16
  float* k_t;                          // [K,16]
  float* v;                            // [16,V]
  float* state;                        // S (forward)
  // backward
  float *d_o, *d_u, *d_e;     // [16,V]
  float* u_t;                 // [V,16]
  float *d_Aqk, *d_Akk;       // [16,16]
  float *d_q, *d_k, *d_gate;  // [16,K] gradients as rows (the later token of a pair), at last of q, k and the gate
  float* d_k_out;             // [16,K] gradient of the keys as columns (the earlier token of a pair)
  float *along_q, *along_k;   // [16,16] <q, dq>, <k, dk> in 16 partial sums
  float* d_beta;              // [16,16] <dU, e> likewise
  float* d_state_t;           // dS^T
  float* d_decay_end;         // [K] gradient of the log decay of the chunk as a whole
  float* d_bias;              // [K]
};

int64_t chunk_work_elements(const KdaDims& d, bool backward);
ChunkWork chunk_work(const KdaDims& d, bool backward, float* memory);

// What forward keeps for backward, of one chain; the states first, then what belongs to each token.
struct Saved {
  float* states;  // [floor((T - 1) / 64), K, V] at the entry of every segment but the first of its document
  Rows e;         // [T, V]
  Rows A;         // [T, 32] the token's rows of Aqk and Akk
  float* state_before(int64_t begin, const KdaDims& d) const { return states + (begin / kSegment - 1) * d.K * d.V; }
};

}  // namespace kestrel::cpu::kda
