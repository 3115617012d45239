// Gated NoPE multi-head latent attention.
//
//   [q_a|latent|k_shared|gate] = x W_in^T
//   q = RMSNorm(q_a) W_qb^T  (or q = x W_q^T);   kv = RMSNorm(latent) W_kvb^T;   k_h = [kv_h's nope part ; k_shared]
//   y = (attention(q, k, v) * sigmoid(gate)) W_o^T
// H heads: nope + rope channels in q and k (never rotated), v channels in v.  Both norms use mla_norm_eps.
#pragma once

#include <string>

#include "kernels/attention/attention.h"
#include "src/model/parameters.h"
#include "src/model/sublayer.h"

namespace kestrel {

class MlaLayer : public Sublayer {
 public:
  MlaLayer(const ModelConfig& config, ParameterStore& store, const std::string& prefix);
  void forward(const Pass& pass, Tensor y, Tensor x) override;
  void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) override;

  // Decoding of one row: T new tokens after `past`.  latent [>= past+T, c] and k_shared [>= past+T, rope] hold the past
  // and get the new tokens' entries.
  void decode(const Pass& pass, Tensor y, Tensor x, int64_t past, Tensor latent, Tensor k_shared);
  int64_t latent_dim() const { return c_; }
  int64_t rope_dim() const { return rope_; }

  // QK-clip: largest scaled logit of each head since the last reset, F32 [H]; empty unless tracked.
  void track_max_logit(Tensor buffer) { max_logit_ = buffer; }
  Tensor max_logit() const { return max_logit_; }
  Block* query_block() const { return q_b_ ? q_b_ : in_; }  // its first H*(nope+rope) rows are the queries' projection
  Block* kv_block() const { return kv_b_; }
  MlaDims dims(int64_t N) const { return {N, H_, nope_, rope_, v_}; }

 private:
  Tensor query_in(Tensor proj) const { return proj.columns(0, q_b_ ? r_ : H_ * (nope_ + rope_)); }
  Tensor latent_in(Tensor proj) const { return proj.columns(query_in(proj).cols(), c_); }
  Tensor k_shared(Tensor proj) const { return proj.columns(query_in(proj).cols() + c_, rope_); }
  Tensor gate(Tensor proj) const { return proj.columns(query_in(proj).cols() + c_ + rope_, H_ * v_); }

  void project(const Pass& pass, Tensor x);
  void normalise(const Pass& pass);
  void assemble(const Pass& pass);
  void apply_gate(const Pass& pass);
  Tensor query() const { return q_b_ ? a_.q : query_in(a_.proj); }
  AttentionDims attention_dims(const Pass& pass) const { return {pass.B, pass.T, H_, nope_ + rope_, v_}; }

  int64_t D_, H_, nope_, rope_, v_, c_, r_ = 0;
  bool gated_;
  float eps_;
  Block *in_, *q_norm_ = nullptr, *q_b_ = nullptr, *kv_norm_, *kv_b_, *o_;
  Tensor max_logit_;

  struct Activations {
    Tensor proj;           // [N, r | c | rope | H v]
    Tensor q_n, q_rstd;    // [N, r], [N]    (q_n pointwise)
    Tensor q;              // [N, H (nope+rope)]
    Tensor kv_n, kv_rstd;  // [N, c], [N]    (kv_n pointwise)
    Tensor kv;             // [N, H (nope+v)]
    Tensor k, v;           // [N, H (nope+rope)], [N, H v]  (pointwise)
    Tensor o, lse;         // [N, H v], [B, H, T]
    Tensor n;              // [N, H v] gated (pointwise); o itself without a gate
  } a_;
};

}  // namespace kestrel
