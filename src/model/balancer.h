// The balance of one MoE layer over a step: counts what the router did, and sets the bias of the next step.
//
// Statistics are gathered in every training micro-batch (never in evaluation or recomputation), pooled over the global
// batch (all micro-batches of all ranks), and turned into the next bias by `solve` - only when the optimizer's update
// was applied; otherwise they are dropped. The bias is a checkpointed fp32 tensor (`e_score_correction_bias`) that no
// optimizer touches. Methods and arithmetic: kernels/router/balancing.h.
#pragma once

#include <vector>

#include "kernels/router/router.h"
#include "src/model/parameters.h"
#include "src/model/pass.h"
#include "src/parallel/communicator.h"

namespace kestrel {

class Balancer {
 public:
  Balancer(const ModelConfig& config, Block* bias);

  void allocate(Arena& arena);
  Routing routing() const;
  Tensor bias() const { return bias_->vector(); }
  Block* bias_block() const { return bias_; }

  void begin_step(Stream& s);
  // One micro-batch: logits [N,E], cutoff [N], its own load [E].
  void observe(const Pass& pass, Tensor logits, Tensor cutoff, Tensor load);
  // Adds the auxiliary loss' gradient to dlogits (method aux_loss only).
  void add_auxiliary(const Pass& pass, Tensor dlogits, Tensor logits, Tensor load);
  // Collective: the statistics of the step become those of all ranks, in the order of the ranks.
  void pool(Stream& s, Communicator& ranks);
  void solve(Stream& s);

  Tensor load() const { return load_; }            // [E] I32, tokens of the step per expert
  Tensor histogram() const { return histogram_; }  // [E,bins] I32, empty for methods without one
  Tensor auxiliary() const { return auxiliary_; }  // [1] F32, empty unless aux_loss

 private:
  bool uses_histogram() const;
  bool keeps_margins() const;
  void solve_exact(Stream& s);

  using Method = BalancingConfig::Method;
  using Estimator = BalancingConfig::Estimator;
  BalancingConfig config_;
  Routing routing_;
  Block* bias_;
  Tensor load_, histogram_, auxiliary_;
  // Estimators other than the histogram, on the host: every margin of the step, or one solution per micro-batch.
  std::vector<float> margins_;
  std::vector<double> mean_of_solutions_;
  int64_t solutions_ = 0;
};

}  // namespace kestrel
