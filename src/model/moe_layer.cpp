#include "src/model/moe_layer.h"

#include <cmath>

#include "kernels/core/elementwise.h"
#include "kernels/gemm/gemm.h"
#include "kernels/norm/norm.h"
#include "kernels/router/balancing.h"
#include "src/model/init.h"

namespace kestrel {
namespace {

// The bias starts at zero; without a fixed k it starts where an expert fires for k of E tokens (logits ~ N(0,
// sigma^2)).
Init bias_init(const ModelConfig& c) {
  if (c.balancing.method != BalancingConfig::Method::quantile_dynamic) return {Init::Kind::zeros};
  const double sigma = c.initializer_range * std::sqrt(static_cast<double>(c.hidden_size));
  return {Init::Kind::constant,
          dynamic_initial_bias(c.num_experts, c.num_experts_per_token, static_cast<float>(sigma))};
}

Block* declare_bias(const ModelConfig& c, ParameterStore& store, const std::string& pre) {
  return store.declare(
      c.num_experts, {vector_member(pre + ".gate.e_score_correction_bias", c.num_experts, bias_init(c), Rule::balance)},
      /*keep_f32=*/true, /*trained=*/false);
}

Member family(std::string name, int64_t count, int64_t rows, int64_t cols, int64_t first_row, int64_t stride,
              Init init) {
  Member m = matrix_member(std::move(name), rows, cols, init, Rule::muon);
  m.count = count;
  m.row = first_row;
  m.row_stride = stride;
  return m;
}

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& c, ParameterStore& store, const std::string& pre)
    : D_(c.hidden_size),
      E_(c.num_experts),
      l_(c.expert_input_size()),
      f_(c.moe_intermediate_size),
      latent_(c.routed_expert_hidden_size.has_value()),
      norm_(latent_ && c.latent_moe_use_norm),
      eps_(static_cast<float>(c.rms_norm_eps)),
      glu_(glu_of(c)),
      router_(store.declare(D_, {matrix_member(pre + ".gate.weight", E_, D_, weight_init(c), Rule::adamw)})),
      balancer_(c, declare_bias(c, store, pre)) {
  if (latent_) {
    down_ =
        store.declare(D_, {matrix_member(pre + ".routed_expert_down_proj.weight", l_, D_, weight_init(c), Rule::muon)});
    if (norm_)
      u_norm_ = store.declare(
          l_, {vector_member(pre + ".routed_expert_norm.weight", l_, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
    up_ = store.declare(l_, {matrix_member(pre + ".routed_expert_up_proj.weight", D_, l_, output_init(c), Rule::muon)});
  }
  w13_ = store.declare(l_, {family(pre + ".experts.{}.w1.weight", E_, f_, l_, 0, 2 * f_, weight_init(c)),
                            family(pre + ".experts.{}.w3.weight", E_, f_, l_, f_, 2 * f_, weight_init(c))});
  w2_ = store.declare(f_, {family(pre + ".experts.{}.w2.weight", E_, l_, f_, 0, l_, output_init(c))});
  if (c.num_shared_experts > 0)
    shared_ = std::make_unique<FfnLayer>(c, store, pre + ".shared_experts", c.shared_width());
}

void MoeLayer::route(const Pass& pass, Tensor x) {
  Stream& s = pass.s;
  const int64_t N = pass.N();
  const Routing r = balancer_.routing();
  a_.logits = pass.save({N, E_}, DType::f32, "router");
  gemm(s, a_.logits, x, Trans::no, router_->w, Trans::yes);
  a_.index = pass.save({N, r.slots}, DType::i32, "router");
  a_.weight = pass.save({N, r.slots}, DType::f32, "router");
  a_.score = pass.save({N, r.slots}, DType::f32, "router");
  a_.load = pass.save({E_}, DType::i32, "router");
  fill_zero(s, a_.load);
  ScratchScope scope(s);
  Tensor cutoff = s.temp({N});
  route_forward(s, r, a_.index, a_.weight, a_.score, cutoff, a_.load, a_.logits, balancer_.bias());
  if (pass.observe) balancer_.observe(pass, a_.logits, cutoff, a_.load);
}

void MoeLayer::dispatch(const Pass& pass, Tensor x) {
  a_.rows = pass.save_pointwise({a_.plan.max_rows(), l_}, pass.dtype, "experts");
  gather_rows(pass.s, a_.rows, latent_ ? a_.z : x, a_.plan);
}

void MoeLayer::activate(const Pass& pass) {
  a_.h = pass.save_pointwise({a_.plan.max_rows(), f_}, pass.dtype, "experts");
  glu_forward(pass.s, glu_, a_.h, a_.gate_up.columns(0, f_), a_.gate_up.columns(f_, f_), a_.p);
}

void MoeLayer::normalise(const Pass& pass) {
  a_.u_n = a_.u;
  if (!norm_) return;
  a_.u_n = pass.save_pointwise({pass.N(), l_}, pass.dtype, "experts");
  rms_norm_forward(pass.s, a_.u_n, a_.u_rstd, a_.u, u_norm_->vector(), eps_);
}

void MoeLayer::forward(const Pass& pass, Tensor y, Tensor x) {
  Stream& s = pass.s;
  const int64_t N = pass.N();
  route(pass, x);
  const int64_t R = a_.index.numel();
  a_.plan = {pass.save({N, a_.index.cols()}, DType::i32, "router"), pass.save({R}, DType::i32, "router"),
             pass.save({E_ + 1}, DType::i64, "router")};
  dispatch_plan(s, a_.plan, a_.index);
  if (latent_) {
    a_.z = pass.save({N, l_}, pass.dtype, "experts");
    linear_forward(s, a_.z, x, down_->w);
  }
  a_.p = pass.save({R}, DType::f32, "router");
  gather_slots(s, a_.p, a_.weight, a_.plan);
  a_.u = pass.save({N, l_}, pass.dtype, "experts");
  a_.gate_up = pass.save({R, 2 * f_}, pass.dtype, "experts");
  dispatch(pass, x);
  grouped_linear_forward(s, a_.gate_up, a_.rows, w13_->w.view({E_, 2 * f_, l_}), a_.plan.offsets);
  activate(pass);
  {
    ScratchScope scope(s);
    Tensor out = s.temp({R, l_}, pass.dtype);
    grouped_linear_forward(s, out, a_.h, w2_->w.view({E_, l_, f_}), a_.plan.offsets);
    sum_rows(s, a_.u, out, a_.plan);
  }
  if (norm_) a_.u_rstd = pass.save({N}, DType::f32, "experts");
  normalise(pass);
  if (shared_) shared_->forward(pass, y, x);
  if (latent_) {
    gemm(s, y, a_.u_n, Trans::no, up_->w, Trans::yes, 1.f, shared_ ? 1.f : 0.f);
  } else if (shared_) {
    add_into(s, y, a_.u);
  } else {
    copy_cast(s, y, a_.u);
  }
}

void MoeLayer::backward_experts(const Pass& pass, Tensor dz, Tensor dweight, Tensor du) {
  Stream& s = pass.s;
  ScratchScope scope(s);
  const int64_t R = a_.plan.max_rows();
  const Tensor w13 = w13_->w.view({E_, 2 * f_, l_}), w2 = w2_->w.view({E_, l_, f_});
  Tensor drows = s.temp({R, l_}, pass.dtype), dh = s.temp({R, f_}, pass.dtype);
  const Tensor dgate_up = a_.gate_up;  // in place: nobody reads the forward's values after the unit's backward
  Tensor dp = s.temp({R});
  gather_rows(s, drows, du, a_.plan);
  grouped_linear_backward_input(s, dh, drows, w2, a_.plan.offsets);
  grouped_linear_backward_weight(s, w2_->g.view({E_, l_, f_}), drows, a_.h, a_.plan.offsets);
  glu_backward(s, glu_, dgate_up.columns(0, f_), dgate_up.columns(f_, f_), dp, dh, a_.gate_up.columns(0, f_),
               a_.gate_up.columns(f_, f_), a_.p);
  grouped_linear_backward_weight(s, w13_->g.view({E_, 2 * f_, l_}), dgate_up, a_.rows, a_.plan.offsets);
  grouped_linear_backward_input(s, drows, dgate_up, w13, a_.plan.offsets);
  sum_rows(s, dz, drows, a_.plan);
  scatter_slots(s, dweight, dp, a_.plan);
}

void MoeLayer::backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) {
  Stream& s = pass.s;
  ScratchScope scope(s);
  const int64_t N = pass.N();
  if (pass.recompute == Recompute::block) {
    forward(pass.recomputing(), s.temp({N, D_}, pass.dtype), x);
  } else if (pass.recompute == Recompute::pointwise) {
    dispatch(pass.recomputing(), x);
    activate(pass.recomputing());
    normalise(pass.recomputing());
  }
  Tensor du = dy;
  if (latent_) {
    Tensor dn = s.temp({N, l_}, pass.dtype);
    linear_backward(s, dn, up_->g, dy, a_.u_n, up_->w);
    du = dn;
    if (norm_) {
      du = s.temp({N, l_}, pass.dtype);
      rms_norm_backward(s, du, u_norm_->grad_vector(), dn, a_.u, u_norm_->vector(), a_.u_rstd);
    }
  }
  // dx is written by the shared expert and added to by the latent projection and the router.
  const bool shared_first = shared_ && latent_;
  if (shared_first) backward_shared(pass, dx, dy, x);
  Tensor dweight = s.temp({N, a_.index.cols()});
  if (latent_) {
    Tensor dz = s.temp({N, l_}, pass.dtype);
    backward_experts(pass, dz, dweight, du);
    linear_backward(s, dx, down_->g, dz, x, down_->w, shared_first ? 1.f : 0.f);
  } else {
    backward_experts(pass, dx, dweight, du);
  }
  Tensor dlogits = s.temp({N, E_});
  route_backward(s, balancer_.routing(), dlogits, dweight, a_.index, a_.score);
  balancer_.add_auxiliary(pass, dlogits, a_.logits, a_.load);
  linear_backward(s, dx, router_->g, dlogits, x, router_->w, 1.f);
  if (shared_ && !shared_first) {
    Tensor dshared = s.temp({N, D_}, pass.dtype);
    backward_shared(pass, dshared, dy, x);
    add_into(s, dx, dshared);
  }
}

void MoeLayer::backward_shared(const Pass& pass, Tensor dx, Tensor dy, Tensor x) {
  Pass inner = pass;
  if (pass.recompute == Recompute::block) inner.recompute = Recompute::none;  // rebuilt by this layer's own forward
  shared_->backward(inner, dx, dy, x);
}

}  // namespace kestrel
