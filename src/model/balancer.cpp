#include "src/model/balancer.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/transfer.h"
#include "kernels/router/balancing.h"
#include "src/parallel/device_sums.h"

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
    std::vector<char> memory;
    const Tensor host = on_host(s, b_hat, memory);
    for (size_t j = 0; j < mean_of_solutions_.size(); ++j) mean_of_solutions_[j] += static_cast<double>(host.f32()[j]);
    ++solutions_;
  } else if (!s.planning()) {
    std::vector<char> memory;
    const Tensor host = on_host(s, m, memory);
    margins_.insert(margins_.end(), host.f32(), host.f32() + host.numel());
  }
}

void Balancer::add_auxiliary(const Pass& pass, Tensor dlogits, Tensor logits, Tensor load) {
  if (config_.method != Method::aux_loss) return;
  aux_loss(pass.s, static_cast<float>(config_.aux_coefficient), static_cast<float>(pass.batch_share), auxiliary_,
           dlogits, logits, load, routing_.k);
}

void Balancer::pool(Stream& s, Communicator& ranks) {
  if (ranks.size() == 1) return;
  sum_over(s, ranks, load_);
  sum_over(s, ranks, histogram_);
  sum_over(s, ranks, auxiliary_);
  if (!keeps_margins()) return;
  ranks.sum(std::span(mean_of_solutions_));
  solutions_ = ranks.sum_of(solutions_);
  const std::string mine(reinterpret_cast<const char*>(margins_.data()), margins_.size() * sizeof(float));
  margins_.clear();
  for (const std::string& theirs : ranks.gather(mine)) {
    const auto* values = reinterpret_cast<const float*>(theirs.data());
    margins_.insert(margins_.end(), values, values + theirs.size() / sizeof(float));
  }
}

// On the host: the margins of a whole step are kept there.
void Balancer::solve_exact(Stream& s) {
  if (s.planning() || (margins_.empty() && solutions_ == 0)) return;
  const int64_t E = routing_.experts;
  const bool dynamic = config_.method == Method::quantile_dynamic;
  std::vector<float> b_hat(static_cast<size_t>(E));
  if (config_.estimator == Estimator::exact) {
    const Tensor all = Tensor::of(margins_.data(), {static_cast<int64_t>(margins_.size()) / E, E});
    const auto solve_all = [&](Stream& cpu) {
      exact_solve(cpu, Tensor::of(b_hat.data(), {E}), all, routing_.k, !dynamic);
    };
    Arena scratch(Device::cpu, planned_bytes(Device::cpu, solve_all));
    Stream cpu(scratch);
    solve_all(cpu);
  } else {
    for (size_t j = 0; j < b_hat.size(); ++j)
      b_hat[j] = static_cast<float>(mean_of_solutions_[j] / static_cast<double>(solutions_));
  }
  const float keep = static_cast<float>(dynamic ? config_.ema : 1.0 - config_.gain);
  std::vector<char> memory;
  const Tensor b = on_host(s, bias(), memory);
  for (int64_t j = 0; j < E; ++j) b.f32()[j] = keep * b.f32()[j] + (1.f - keep) * b_hat[static_cast<size_t>(j)];
  if (bias().device != Device::cpu) {
    upload(s, bias(), b);
    wait(s);
  }
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
