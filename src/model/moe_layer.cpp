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

// One tensor of every expert, the first `first_row` rows into the expert's `stride`.
Member family(std::string name, int64_t experts, const ExpertExchange& here, int64_t rows, int64_t cols,
              int64_t first_row, int64_t stride, Init init) {
  Member m = matrix_member(std::move(name), rows, cols, init, Rule::muon);
  m.count = here.count();
  m.first = here.first();
  m.family = experts;
  m.row = first_row;
  m.row_stride = stride;
  return m;
}

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& c, ParameterStore& store, const std::string& pre, const ExpertShare& share)
    : store_(store),
      exchange_(share, c.num_experts),
      D_(c.hidden_size),
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
  w13_ = store.declare_experts(
      l_, {family(pre + ".experts.{}.w1.weight", E_, exchange_, f_, l_, 0, 2 * f_, weight_init(c)),
           family(pre + ".experts.{}.w3.weight", E_, exchange_, f_, l_, f_, 2 * f_, weight_init(c))});
  w2_ =
      store.declare_experts(f_, {family(pre + ".experts.{}.w2.weight", E_, exchange_, l_, f_, 0, l_, output_init(c))});
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

void MoeLayer::send_rows(Stream& s, Tensor rows, Tensor x) {
  if (exchange_.alone()) return gather_rows(s, rows, x, a_.plan);
  ScratchScope scope(s);
  Tensor sent = s.temp({a_.plan.max_rows(), x.cols()}, x.dtype);
  gather_rows(s, sent, x, a_.plan);
  exchange_.to_experts(s, a_.route, rows, sent);
}

void MoeLayer::send_slots(Stream& s, Tensor rows, Tensor value) {
  if (exchange_.alone()) return gather_slots(s, rows, value, a_.plan);
  ScratchScope scope(s);
  Tensor sent = s.temp({a_.plan.max_rows()});
  gather_slots(s, sent, value, a_.plan);
  exchange_.to_experts(s, a_.route, rows, sent);
}

void MoeLayer::collect_rows(Stream& s, Tensor y, Tensor rows) {
  if (exchange_.alone()) return sum_rows(s, y, rows, a_.plan);
  ScratchScope scope(s);
  Tensor returned = s.temp({a_.plan.max_rows(), y.cols()}, y.dtype);
  exchange_.from_experts(s, a_.route, returned, rows);
  sum_rows(s, y, returned, a_.plan);
}

void MoeLayer::collect_slots(Stream& s, Tensor value, Tensor rows) {
  if (exchange_.alone()) return scatter_slots(s, value, rows, a_.plan);
  ScratchScope scope(s);
  Tensor returned = s.temp({a_.plan.max_rows()});
  exchange_.from_experts(s, a_.route, returned, rows);
  scatter_slots(s, value, returned, a_.plan);
}

template <class F>
void MoeLayer::for_each_source(F&& fn) const {
  if (exchange_.alone()) return fn(0, a_.plan.max_rows(), a_.plan.offsets);
  int64_t first = 0;
  for (int64_t q = 0; q < exchange_.ranks(); ++q) {
    const int64_t rows = a_.route.received[static_cast<size_t>(q)];
    if (rows > 0) fn(first, rows, a_.route.offsets[q]);
    first += rows;
  }
}

void MoeLayer::expert_products(Stream& s, Tensor y, Tensor x, const Block& w, int64_t out) {
  for_each_source([&](int64_t first, int64_t rows, Tensor offsets) {
    grouped_linear_forward(s, y.slice(first, rows), x.slice(first, rows), w.w.view({exchange_.count(), out, w.cols}),
                           offsets);
  });
}

void MoeLayer::expert_input_gradients(Stream& s, Tensor dx, Tensor dy, const Block& w, int64_t out) {
  for_each_source([&](int64_t first, int64_t rows, Tensor offsets) {
    grouped_linear_backward_input(s, dx.slice(first, rows), dy.slice(first, rows),
                                  w.w.view({exchange_.count(), out, w.cols}), offsets);
  });
}

// Of each source by itself: its micro-batch leaves the same gradients wherever the experts are.
void MoeLayer::expert_weight_gradients(Stream& s, const Block& w, int64_t out, Tensor dy, Tensor x) {
  for_each_source([&](int64_t first, int64_t rows, Tensor offsets) {
    grouped_linear_backward_weight(s, w.g.view({exchange_.count(), out, w.cols}), dy.slice(first, rows),
                                   x.slice(first, rows), offsets);
    if (!exchange_.alone()) store_.fold_gradients(s, w);
  });
}

void MoeLayer::dispatch(const Pass& pass, Tensor x) {
  a_.rows = pass.save_pointwise({rows_here(), l_}, pass.dtype, "experts");
  send_rows(pass.s, a_.rows, latent_ ? a_.z : x);
}

void MoeLayer::activate(const Pass& pass) {
  a_.h = pass.save_pointwise({rows_here(), f_}, pass.dtype, "experts");
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
  a_.plan = {pass.save({N, a_.index.cols()}, DType::i32, "router"), pass.save({a_.index.numel()}, DType::i32, "router"),
             pass.save({E_ + 1}, DType::i64, "router")};
  dispatch_plan(s, a_.plan, a_.index);
  if (!exchange_.alone()) {
    a_.route = exchange_.route(s, a_.plan);
    a_.route.offsets = pass.save({exchange_.ranks(), exchange_.count() + 1}, DType::i64, "router");
    exchange_.fill_offsets(s, a_.route);
  }
  const int64_t R = rows_here();
  if (latent_) {
    a_.z = pass.save({N, l_}, pass.dtype, "experts");
    linear_forward(s, a_.z, x, down_->w);
  }
  a_.p = pass.save({R}, DType::f32, "router");
  send_slots(s, a_.p, a_.weight);
  a_.u = pass.save({N, l_}, pass.dtype, "experts");
  a_.gate_up = pass.save({R, 2 * f_}, pass.dtype, "experts");
  dispatch(pass, x);
  expert_products(s, a_.gate_up, a_.rows, *w13_, 2 * f_);
  activate(pass);
  {
    ScratchScope scope(s);
    Tensor out = s.temp({R, l_}, pass.dtype);
    expert_products(s, out, a_.h, *w2_, l_);
    collect_rows(s, a_.u, out);
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
  const int64_t R = rows_here();
  Tensor drows = s.temp({R, l_}, pass.dtype), dh = s.temp({R, f_}, pass.dtype);
  const Tensor dgate_up = a_.gate_up;  // in place: nobody reads the forward's values after the unit's backward
  Tensor dp = s.temp({R});
  send_rows(s, drows, du);
  expert_input_gradients(s, dh, drows, *w2_, l_);
  expert_weight_gradients(s, *w2_, l_, drows, a_.h);
  glu_backward(s, glu_, dgate_up.columns(0, f_), dgate_up.columns(f_, f_), dp, dh, a_.gate_up.columns(0, f_),
               a_.gate_up.columns(f_, f_), a_.p);
  expert_weight_gradients(s, *w13_, 2 * f_, dgate_up, a_.rows);
  expert_input_gradients(s, drows, dgate_up, *w13_, 2 * f_);
  collect_rows(s, dz, drows);
  collect_slots(s, dweight, dp);
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
