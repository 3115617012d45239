#include "src/model/kda_layer.h"

#include <cmath>

#include "kernels/core/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/norm/norm.h"
#include "kernels/short_conv/short_conv.h"
#include "src/model/init.h"

namespace kestrel {

KdaLayer::KdaLayer(const ModelConfig& c, ParameterStore& store, const std::string& pre)
    : D_(c.hidden_size),
      H_(c.linear_attn.num_heads),
      K_(c.linear_attn.head_dim),
      W_(c.linear_attn.short_conv_kernel_size),
      full_rank_gate_(c.linear_attn.use_full_rank_gate),
      eps_(static_cast<float>(c.rms_norm_eps)) {
  if (c.linear_attn.gate_lower_bound) lower_bound_ = static_cast<float>(*c.linear_attn.gate_lower_bound);
  const Init w = weight_init(c);
  const int64_t HK = H_ * K_;
  std::vector<Member> in;
  for (const char* n : {"q", "k", "v"})
    in.push_back(matrix_member(pre + "." + n + "_proj.weight", HK, D_, w, Rule::muon, {K_}));
  in.push_back(full_rank_gate_ ? matrix_member(pre + ".g_proj.weight", HK, D_, w, Rule::muon)
                               : matrix_member(pre + ".g_a_proj.weight", K_, D_, w, Rule::muon));
  in.push_back(matrix_member(pre + ".f_a_proj.weight", K_, D_, w, Rule::muon));
  in.push_back(matrix_member(pre + ".b_proj.weight", H_, D_, w, Rule::adamw));
  in_ = store.declare(D_, std::move(in));

  std::vector<Member> conv;
  const Init conv_init{Init::Kind::uniform,
                       1.0 / std::sqrt(static_cast<double>(W_))};  // a width-W filter of unit-variance input
  for (const char* n : {"q", "k", "v"}) {
    conv.push_back(matrix_member(pre + "." + n + "_conv1d.weight", HK, W_, conv_init, Rule::adamw));
    conv.back().shape = {HK, 1, W_};
  }
  conv_ = store.declare(W_, std::move(conv), /*keep_f32=*/true);
  A_log_ = store.declare(H_, {vector_member(pre + ".A_log", H_, {Init::Kind::zeros}, Rule::adamw_no_decay)}, true);
  dt_bias_ =
      store.declare(HK, {vector_member(pre + ".dt_bias", HK, {Init::Kind::dt_bias}, Rule::adamw_no_decay)}, true);
  f_b_ = store.declare(K_, {matrix_member(pre + ".f_b_proj.weight", HK, K_, w, Rule::muon)});
  if (!full_rank_gate_) g_b_ = store.declare(K_, {matrix_member(pre + ".g_b_proj.weight", HK, K_, w, Rule::muon)});
  o_norm_ =
      store.declare(K_, {vector_member(pre + ".o_norm.weight", K_, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
  o_ = store.declare(HK, {matrix_member(pre + ".o_proj.weight", D_, HK, output_init(c), Rule::muon)});
}

KdaInputs KdaLayer::kda_inputs(const Pass& pass) const {
  const int64_t HK = H_ * K_;
  KdaInputs in;
  in.q = a_.qkv.columns(0, HK);
  in.k = a_.qkv.columns(HK, HK);
  in.v = a_.qkv.columns(2 * HK, HK);
  in.gate = a_.decay;
  in.beta = beta(a_.proj);
  in.A_log = A_log_->vector();
  in.dt_bias = dt_bias_->vector();
  in.lower_bound = lower_bound_;
  in.document_start = pass.document_start;
  return in;
}

void KdaLayer::project(const Pass& pass, Tensor x) {
  const int64_t N = pass.N(), HK = H_ * K_;
  a_.proj = pass.save({N, in_->rows}, pass.dtype, "kda");
  linear_forward(pass.s, a_.proj, x, in_->w);
  a_.decay = pass.save({N, HK}, pass.dtype, "kda");
  linear_forward(pass.s, a_.decay, decay_in(a_.proj), f_b_->w);
  if (!full_rank_gate_) {
    a_.gate = pass.save({N, HK}, pass.dtype, "kda");
    linear_forward(pass.s, a_.gate, gate_in(a_.proj), g_b_->w);
  }
}

void KdaLayer::convolve(const Pass& pass, Tensor history) {
  a_.qkv = pass.save_pointwise({pass.N(), 3 * H_ * K_}, pass.dtype, "kda");
  short_conv_forward(pass.s, pass.B, pass.T, a_.qkv, qkv(a_.proj), conv_->w, pass.document_start, history);
}

void KdaLayer::normalise(const Pass& pass) {
  a_.n = pass.save_pointwise({pass.N(), H_ * K_}, pass.dtype, "kda");
  gated_rms_norm_forward(pass.s, a_.n, a_.rstd, a_.o, gate(), o_norm_->vector(), eps_);
}

void KdaLayer::forward(const Pass& pass, Tensor y, Tensor x) {
  const int64_t N = pass.N();
  project(pass, x);
  convolve(pass);
  a_.o = pass.save({N, H_ * K_}, pass.dtype, "kda");
  a_.state = pass.save({kda_saved_elements(dims(pass), pass.s.device(), pass.dtype)}, DType::f32, "kda states");
  kda_forward(pass.s, dims(pass), kda_inputs(pass), a_.o, {}, a_.state);
  a_.rstd = pass.save({N, H_}, DType::f32, "kda");
  normalise(pass);
  linear_forward(pass.s, y, a_.n, o_->w);
}

void KdaLayer::backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) {
  ScratchScope scope(pass.s);
  const int64_t N = pass.N(), HK = H_ * K_;
  if (pass.recompute == Recompute::block) {
    forward(pass.recomputing(), pass.s.temp({N, D_}, pass.dtype), x);
  } else if (pass.recompute == Recompute::pointwise) {
    convolve(pass.recomputing());
    normalise(pass.recomputing());
  }
  Tensor dproj = pass.s.temp({N, in_->rows}, pass.dtype);
  Tensor d_o = pass.s.temp({N, HK}, pass.dtype);
  {
    ScratchScope inner(pass.s);
    Tensor dn = pass.s.temp({N, HK}, pass.dtype);
    linear_backward(pass.s, dn, o_->g, dy, a_.n, o_->w);
    Tensor dgate = full_rank_gate_ ? gate_in(dproj) : pass.s.temp({N, HK}, pass.dtype);
    gated_rms_norm_backward(pass.s, d_o, dgate, o_norm_->grad_vector(), dn, a_.o, gate(), o_norm_->vector(), a_.rstd);
    if (!full_rank_gate_) linear_backward(pass.s, gate_in(dproj), g_b_->g, dgate, gate_in(a_.proj), g_b_->w);
  }
  Tensor dqkv = pass.s.temp({N, 3 * HK}, pass.dtype);
  Tensor ddecay = pass.s.temp({N, HK}, pass.dtype);
  KdaGrads g{dqkv.columns(0, HK), dqkv.columns(HK, HK),  dqkv.columns(2 * HK, HK), ddecay,
             beta(dproj),         A_log_->grad_vector(), dt_bias_->grad_vector(),  {}};
  kda_backward(pass.s, dims(pass), kda_inputs(pass), a_.state, d_o, {}, g);
  linear_backward(pass.s, decay_in(dproj), f_b_->g, ddecay, decay_in(a_.proj), f_b_->w);
  short_conv_backward(pass.s, pass.B, pass.T, qkv(dproj), conv_->g, dqkv, qkv(a_.proj), conv_->w, pass.document_start);
  linear_backward(pass.s, dx, in_->g, dproj, x, in_->w);
}

void KdaLayer::decode(const Pass& pass, Tensor y, Tensor x, Tensor state, Tensor history) {
  ScratchScope scope(pass.s);
  const int64_t N = pass.N(), HK = H_ * K_, W1 = W_ - 1;
  project(pass, x);
  convolve(pass, history);
  a_.o = pass.save({N, HK}, pass.dtype, "kda");
  KdaInputs in = kda_inputs(pass);
  in.initial_state = pass.s.temp({pass.B, H_, K_, K_});
  copy_cast(pass.s, in.initial_state, state);
  kda_forward(pass.s, dims(pass), in, a_.o, state, {});
  a_.rstd = pass.save({N, H_}, DType::f32, "kda");
  normalise(pass);
  linear_forward(pass.s, y, a_.n, o_->w);
  // The last W-1 inputs of each row are the next call's history.
  for (int64_t b = 0; b < pass.B && W1 > 0; ++b) {
    const Tensor row = qkv(a_.proj).slice(b * pass.T, pass.T);
    const Tensor h = history.slice(b * W1, W1);
    const int64_t old = std::max<int64_t>(0, W1 - pass.T);  // entries of the old history that stay
    if (old > 0) {  // the two ranges may overlap
      const Tensor kept = pass.s.temp({old, history.cols()}, history.dtype);
      copy_cast(pass.s, kept, h.slice(W1 - old, old));
      copy_cast(pass.s, h.slice(0, old), kept);
    }
    copy_cast(pass.s, h.slice(old, W1 - old), row.slice(pass.T - (W1 - old), W1 - old));
  }
}

}  // namespace kestrel
