// How chains are cut, and the scratch of a chunk.
#include "kernels/kda/kda_chunk.h"

#include <algorithm>

namespace kestrel::cpu::kda {
namespace {

int64_t pad(int64_t n) {
  return (n + kChunk - 1) / kChunk * kChunk;
}

// Hands out pieces of `memory`, whole cache lines; with no memory it only counts.
struct Carver {
  float* memory;
  int64_t used = 0;
  float* operator()(int64_t n) {
    float* p = memory == nullptr ? nullptr : memory + used;
    used += (n + 15) / 16 * 16;
    return p;
  }
};

Chunk carve_chunk(int64_t K, int64_t V, bool backward, Carver& take) {
  Chunk x{};
  for (float** p : {&x.q, &x.k, &x.decay, &x.q_in, &x.k_in, &x.k_out_t}) *p = take(kChunk * K);
  for (float** p : {&x.e, &x.u}) *p = take(kChunk * V);
  for (float** p : {&x.Aqk, &x.Akk}) *p = take(kChunk * kChunk);
  x.decay_all = take(K);
  for (float** p : {&x.beta, &x.q_norm, &x.k_norm}) *p = take(kChunk);
  if (!backward) return x;
  for (float** p : {&x.decay_in, &x.k_out, &x.gate_slope, &x.A_slope}) *p = take(kChunk * K);
  x.state_t = take(K * V);
  return x;
}

ChunkWork carve(const KdaDims& d, bool backward, Carver& take) {
  ChunkWork w{};
  const int64_t K = w.K = pad(d.K), V = w.V = pad(d.V);
  for (int64_t n = 0; n < (backward ? kChunksPerSegment : 1); ++n) w.chunks[n] = carve_chunk(K, V, backward, take);
  w.bias = take(K);
  for (float** p : {&w.rows_q, &w.rows_k, &w.rows_gate}) *p = take(d.K == K ? 0 : kChunk * K);
  if (!backward) {
    w.k_t = take(kChunk * K);
    w.v = take(kChunk * V);
    w.state = take(K * V);
    return w;
  }
  for (float** p : {&w.d_o, &w.d_u, &w.d_e, &w.u_t}) *p = take(kChunk * V);
  for (float** p : {&w.d_q, &w.d_k, &w.d_gate, &w.d_k_out}) *p = take(kChunk * K);
  for (float** p : {&w.d_Aqk, &w.d_Akk, &w.along_q, &w.along_k, &w.d_beta}) *p = take(kChunk * kChunk);
  w.d_state_t = take(K * V);
  for (float** p : {&w.d_decay_end, &w.d_bias}) *p = take(K);
  return w;
}

}  // namespace

int64_t document_of(const ChainInputs& in, int64_t t) {
  return in.document_start == nullptr ? 0 : in.document_start[t];
}

Span chunk_from(const ChainInputs& in, int64_t begin, int64_t T) {
  int64_t end = begin + 1;
  while (end < T && end < begin + kChunk && !restarts(in, end)) ++end;
  return {begin, end};
}

Span segment_before(const ChainInputs& in, int64_t end) {
  const int64_t document = document_of(in, end - 1);
  return {document + (end - 1 - document) / kSegment * kSegment, end};
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

}  // namespace kestrel::cpu::kda
