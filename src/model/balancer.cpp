#include "src/model/balancer.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/elementwise.h"
#include "kernels/router/balancing.h"

namespace kestrel {

Balancer::Balancer(const ModelConfig& c, Block* bias) : config_(c.balancing), bias_(bias) {
  routing_.experts = c.num_experts;
  routing_.k = c.num_experts_per_token;
  routing_.threshold = config_.method == Method::quantile_dynamic;
  // The dynamic form has no fixed k: twice the mean is the cap of one token.
  routing_.slots = routing_.threshold ? std::min(2 * routing_.k, routing_.experts) : routing_.k;
  routing_.renormalize = c.moe_renormalize;
  routing_.scaling = static_cast<float>(c.routed_scaling_factor);
}

Routing Balancer::routing() const {
  return routing_;
}

bool Balancer::uses_histogram() const {
  return (config_.method == Method::quantile || config_.method == Method::quantile_dynamic) &&
         config_.estimator == Estimator::histogram;
}

bool Balancer::keeps_margins() const {
  return (config_.method == Method::quantile || config_.method == Method::quantile_dynamic) &&
         config_.estimator != Estimator::histogram;
}

void Balancer::allocate(Arena& arena) {
  load_ = arena.keep({routing_.experts}, DType::i32, "balance");
  if (uses_histogram()) histogram_ = arena.keep({routing_.experts, config_.bins}, DType::i32, "balance");
  if (config_.method == Method::aux_loss) auxiliary_ = arena.keep({1}, DType::f32, "balance");
}

void Balancer::begin_step(Stream& s) {
  fill_zero(s, load_);
  if (histogram_) fill_zero(s, histogram_);
  if (auxiliary_) fill_zero(s, auxiliary_);
  margins_.clear();
  mean_of_solutions_.assign(static_cast<size_t>(routing_.experts), 0.0);
  solutions_ = 0;
}

void Balancer::observe(const Pass& pass, Tensor logits, Tensor cutoff, Tensor load) {
  Stream& s = pass.s;
  add_into(s, load_, load);
  const bool dynamic = config_.method == Method::quantile_dynamic;
  if (uses_histogram()) {
    if (dynamic) {
      score_histogram(s, histogram_, logits);
    } else {
      quantile_histogram(s, histogram_, logits, cutoff, bias());
    }
  }
  if (!keeps_margins()) return;
  ScratchScope scope(s);
  Tensor m = s.temp({logits.rows(), routing_.experts});
  margins(s, m, logits, dynamic ? Tensor{} : cutoff);
  Tensor b_hat = s.temp({routing_.experts});
  if (config_.estimator == Estimator::micro_mean) {
    exact_solve(s, b_hat, m, routing_.k, !dynamic);
    if (s.planning()) return;
    for (size_t j = 0; j < mean_of_solutions_.size(); ++j) mean_of_solutions_[j] += b_hat.f32()[j];
    ++solutions_;
  } else if (!s.planning()) {
    margins_.insert(margins_.end(), m.f32(), m.f32() + m.numel());
  }
}

void Balancer::add_auxiliary(const Pass& pass, Tensor dlogits, Tensor logits, Tensor load) {
  if (config_.method != Method::aux_loss) return;
  aux_loss(pass.s, static_cast<float>(config_.aux_coefficient), static_cast<float>(pass.batch_share), auxiliary_,
           dlogits, logits, load, routing_.k);
}

void Balancer::solve_exact(Stream& s) {
  ScratchScope scope(s);
  const int64_t E = routing_.experts;
  const bool dynamic = config_.method == Method::quantile_dynamic;
  Tensor b_hat = s.temp({E});
  if (config_.estimator == Estimator::exact) {
    if (margins_.empty()) return;
    exact_solve(s, b_hat, Tensor::of(margins_.data(), {static_cast<int64_t>(margins_.size()) / E, E}), routing_.k,
                !dynamic);
  } else {
    if (solutions_ == 0) return;
    for (int64_t j = 0; j < E; ++j)
      b_hat.f32()[j] = static_cast<float>(mean_of_solutions_[static_cast<size_t>(j)] / static_cast<double>(solutions_));
  }
  const float keep = static_cast<float>(dynamic ? config_.ema : 1.0 - config_.gain);
  float* b = bias().f32();
  for (int64_t j = 0; j < E; ++j) b[j] = keep * b[j] + (1.f - keep) * b_hat.f32()[j];
}

void Balancer::solve(Stream& s) {
  switch (config_.method) {
    case Method::quantile:
      if (uses_histogram()) {
        quantile_solve(s, bias(), histogram_, routing_.k, static_cast<float>(config_.gain));
      } else {
        solve_exact(s);
      }
      break;
    case Method::quantile_dynamic:
      if (uses_histogram()) {
        dynamic_solve(s, bias(), histogram_, routing_.k, static_cast<float>(config_.ema));
      } else {
        solve_exact(s);
      }
      break;
    case Method::sign:
      sign_solve(s, bias(), load_, static_cast<float>(config_.sign_rate));
      break;
    case Method::aux_loss:
    case Method::none:
      break;
  }
}

}  // namespace kestrel
