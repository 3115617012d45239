#include "src/model/mla_layer.h"

#include "kernels/core/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/glu/glu.h"
#include "kernels/norm/norm.h"
#include "src/model/init.h"

namespace kestrel {

MlaLayer::MlaLayer(const ModelConfig& c, ParameterStore& store, const std::string& pre)
    : D_(c.hidden_size),
      H_(c.num_attention_heads),
      nope_(c.qk_nope_head_dim),
      rope_(c.qk_rope_head_dim),
      v_(c.v_head_dim),
      c_(c.kv_lora_rank),
      gated_(c.mla_use_output_gate),
      eps_(static_cast<float>(c.mla_norm_eps)) {
  const Init w = weight_init(c);
  const int64_t q_rows = H_ * (nope_ + rope_);
  std::vector<Member> in;
  if (c.q_lora_rank) {
    r_ = *c.q_lora_rank;
    in.push_back(matrix_member(pre + ".q_a_proj.weight", r_, D_, w, Rule::muon));
  } else {
    in.push_back(matrix_member(pre + ".q_proj.weight", q_rows, D_, w, Rule::muon, {nope_ + rope_}));
  }
  in.push_back(matrix_member(pre + ".kv_a_proj_with_mqa.weight", c_ + rope_, D_, w, Rule::muon));
  if (gated_) in.push_back(matrix_member(pre + ".g_proj.weight", H_ * v_, D_, w, Rule::muon));
  in_ = store.declare(D_, std::move(in));
  if (c.q_lora_rank) {
    q_norm_ = store.declare(
        r_, {vector_member(pre + ".q_a_layernorm.weight", r_, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
    q_b_ = store.declare(r_, {matrix_member(pre + ".q_b_proj.weight", q_rows, r_, w, Rule::muon, {nope_ + rope_})});
  }
  kv_norm_ = store.declare(
      c_, {vector_member(pre + ".kv_a_layernorm.weight", c_, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
  kv_b_ =
      store.declare(c_, {matrix_member(pre + ".kv_b_proj.weight", H_ * (nope_ + v_), c_, w, Rule::muon, {nope_, v_})});
  o_ = store.declare(H_ * v_, {matrix_member(pre + ".o_proj.weight", D_, H_ * v_, output_init(c), Rule::muon)});
}

void MlaLayer::normalise(const Pass& pass) {
  if (q_b_) {
    a_.q_n = pass.save_pointwise({pass.N(), r_}, pass.dtype, "mla");
    rms_norm_forward(pass.s, a_.q_n, a_.q_rstd, query_in(a_.proj), q_norm_->vector(), eps_);
  }
  a_.kv_n = pass.save_pointwise({pass.N(), c_}, pass.dtype, "mla");
  rms_norm_forward(pass.s, a_.kv_n, a_.kv_rstd, latent_in(a_.proj), kv_norm_->vector(), eps_);
}

void MlaLayer::assemble(const Pass& pass) {
  const int64_t N = pass.N();
  a_.k = pass.save_pointwise({N, H_ * (nope_ + rope_)}, pass.dtype, "mla");
  a_.v = pass.save_pointwise({N, H_ * v_}, pass.dtype, "mla");
  mla_assemble_forward(pass.s, dims(N), a_.k, a_.v, a_.kv, k_shared(a_.proj));
}

void MlaLayer::apply_gate(const Pass& pass) {
  a_.n = a_.o;
  if (!gated_) return;
  a_.n = pass.save_pointwise({pass.N(), H_ * v_}, pass.dtype, "mla");
  sigmoid_gate_forward(pass.s, a_.n, a_.o, gate(a_.proj));
}

// Everything up to the queries and the normalised latents.
void MlaLayer::project(const Pass& pass, Tensor x) {
  const int64_t N = pass.N();
  a_.proj = pass.save({N, in_->rows}, pass.dtype, "mla");
  linear_forward(pass.s, a_.proj, x, in_->w);
  if (q_b_) a_.q_rstd = pass.save({N}, DType::f32, "mla");
  a_.kv_rstd = pass.save({N}, DType::f32, "mla");
  normalise(pass);
  if (q_b_) {
    a_.q = pass.save({N, q_b_->rows}, pass.dtype, "mla");
    linear_forward(pass.s, a_.q, a_.q_n, q_b_->w);
  }
}

void MlaLayer::forward(const Pass& pass, Tensor y, Tensor x) {
  const int64_t N = pass.N();
  project(pass, x);
  a_.kv = pass.save({N, kv_b_->rows}, pass.dtype, "mla");
  linear_forward(pass.s, a_.kv, a_.kv_n, kv_b_->w);
  assemble(pass);
  a_.o = pass.save({N, H_ * v_}, pass.dtype, "mla");
  a_.lse = pass.save({pass.B, H_, pass.T}, DType::f32, "mla");
  attention_forward(pass.s, attention_dims(pass), a_.o, a_.lse, query(), a_.k, a_.v, pass.document_start,
                    pass.observe ? max_logit_ : Tensor{});
  apply_gate(pass);
  linear_forward(pass.s, y, a_.n, o_->w);
}

void MlaLayer::backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) {
  ScratchScope scope(pass.s);
  const int64_t N = pass.N();
  if (pass.recompute == Recompute::block) {
    forward(pass.recomputing(), pass.s.temp({N, D_}, pass.dtype), x);
  } else if (pass.recompute == Recompute::pointwise) {
    normalise(pass.recomputing());
    assemble(pass.recomputing());
    apply_gate(pass.recomputing());
  }
  Tensor dproj = pass.s.temp({N, in_->rows}, pass.dtype);
  Tensor d_o = pass.s.temp({N, H_ * v_}, pass.dtype);
  {
    ScratchScope inner(pass.s);
    Tensor dn = gated_ ? pass.s.temp({N, H_ * v_}, pass.dtype) : d_o;
    linear_backward(pass.s, dn, o_->g, dy, a_.n, o_->w);
    if (gated_) sigmoid_gate_backward(pass.s, d_o, gate(dproj), dn, a_.o, gate(a_.proj));
  }
  Tensor dkv = pass.s.temp({N, kv_b_->rows}, pass.dtype);
  Tensor dq = q_b_ ? pass.s.temp({N, q_b_->rows}, pass.dtype) : query_in(dproj);
  {
    ScratchScope inner(pass.s);
    Tensor dk = pass.s.temp({N, H_ * (nope_ + rope_)}, pass.dtype), dv = pass.s.temp({N, H_ * v_}, pass.dtype);
    attention_backward(pass.s, attention_dims(pass), dq, dk, dv, d_o, a_.o, a_.lse, query(), a_.k, a_.v,
                       pass.document_start);
    mla_assemble_backward(pass.s, dims(N), dkv, k_shared(dproj), dk, dv);
  }
  Tensor dkv_n = pass.s.temp({N, c_}, pass.dtype);
  linear_backward(pass.s, dkv_n, kv_b_->g, dkv, a_.kv_n, kv_b_->w);
  rms_norm_backward(pass.s, latent_in(dproj), kv_norm_->grad_vector(), dkv_n, latent_in(a_.proj), kv_norm_->vector(),
                    a_.kv_rstd);
  if (q_b_) {
    Tensor dq_n = pass.s.temp({N, r_}, pass.dtype);
    linear_backward(pass.s, dq_n, q_b_->g, dq, a_.q_n, q_b_->w);
    rms_norm_backward(pass.s, query_in(dproj), q_norm_->grad_vector(), dq_n, query_in(a_.proj), q_norm_->vector(),
                      a_.q_rstd);
  }
  linear_backward(pass.s, dx, in_->g, dproj, x, in_->w);
}

void MlaLayer::decode(const Pass& pass, Tensor y, Tensor x, int64_t past, Tensor latent, Tensor k_shared_cache) {
  ScratchScope scope(pass.s);
  KESTREL_CHECK(pass.B == 1, "decoding takes one row, got ", pass.B);
  const int64_t N = pass.N();
  project(pass, x);
  copy_cast(pass.s, latent.slice(past, N), a_.kv_n);
  copy_cast(pass.s, k_shared_cache.slice(past, N), k_shared(a_.proj));
  a_.o = pass.save({N, H_ * v_}, pass.dtype, "mla");
  mla_decode(pass.s, dims(N), past, a_.o, query(), latent.slice(0, past + N), k_shared_cache.slice(0, past + N),
             kv_b_->w);
  apply_gate(pass);
  linear_forward(pass.s, y, a_.n, o_->w);
}

}  // namespace kestrel
