// The optimizer of a whole model: which tensor is updated by what, the state, and one step.
//
// Muon owns the matrices (per head where the layer says so and optimizer.per_head is on); embeddings, classifier,
// router, beta projection and convolutions are AdamW's with decay; norms, A_log, dt_bias and depth queries AdamW's
// without.  The balance bias belongs to nobody here.  State: the momentum m for every trained element, and v where
// AdamW works.  Of several ranks each updates its share and keeps the state of that (update_shares.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/core/transfer.h"
#include "kernels/optimizer/optimizer.h"
#include "src/model/model.h"
#include "src/train/update_shares.h"

namespace kestrel {

class Optimizer {
 public:
  // `planned`: no state is allocated; only `plan` may be called.
  Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device, UpdateShares shares,
            bool planned = false);
  // On one rank.
  Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device)
      : Optimizer(store, config, device, UpdateShares(store)) {}

  // Bytes of state of a share.
  static int64_t state_bytes(const ParameterStore& store, const OptimizerConfig& config, const UpdateShares& shares);

  // Takes the scratch of measure and step from a planner.
  void plan(Stream& s);
  // Collective.  Sums the gradients over ranks and queues what the host must know before the step: after the next wait,
  // gradient_norm and clip_heads know it.
  void measure(Stream& s, const Model& model);
  // Collective.  L2 norm over all gradients of all ranks at the last `measure`, non-finite if any element was.
  double gradient_norm() const;
  // min(1, grad_clip / (norm + 1e-6)); 1 without clipping.
  float clip_scale(double norm) const;
  // Collective.  One update with gradients times grad_scale; `update` counts applied updates from 1 (AdamW's bias
  // correction).
  void step(Stream& s, int64_t update, double lr, float grad_scale);
  // After a step: heads whose largest logit at the last `measure` exceeded optimizer.qk_clip are scaled down.  Returns
  // their number.
  int64_t clip_heads(Stream& s, Model& model);
  bool clips_heads() const { return config_.qk_clip.has_value(); }

  const UpdateShares& shares() const { return shares_; }

  // The state of this rank's share by name ("optimizer.m.<parameter>", "optimizer.v.<parameter>"): rows [first_row,
  // first_row + tensor rows) of a tensor of the parameter's shape.
  struct StatePart {
    std::string name;
    std::vector<int64_t> shape;
    int64_t first_row = 0;
    Tensor tensor;
  };
  void for_each_state(const std::function<void(const StatePart&)>& fn) const;

  // How a tensor is updated, for the start-up table and its test.
  struct Assignment {
    enum class Kind { none, adamw, muon } kind = Kind::none;
    bool weight_decay = false;        // adamw
    std::vector<int64_t> row_blocks;  // muon
  };
  static Assignment assignment(const OptimizerConfig& config, const Member& member);

 private:
  struct MuonTask {
    Tensor p, g, m;  // [count, rows, cols]
    int64_t stride;
  };
  struct AdamWTask {
    Tensor p, g, m, v;
    bool decay;
  };
  void add_muon(Block& block, const Member& member);
  void add_adamw(Block& block, const Member& member, bool decay, int64_t* v_offset);
  Tensor momentum_of(const Block& block, int64_t row, int64_t rows) const;  // of rows that are this rank's

  void queue_square_sum(Stream& s);

  ParameterStore& store_;
  OptimizerConfig config_;
  UpdateShares shares_;
  Device device_;
  std::unique_ptr<Arena> memory_;
  std::array<Tensor, 2> m_;  // by region
  Tensor v_;
  Tensor square_sum_;                               // [1] F64
  PinnedBuffer square_sum_host_, max_logits_host_;  // [1] F64; [MLA layers, heads] F32, made when first measured
  std::vector<MuonTask> muon_;
  std::vector<AdamWTask> adamw_;
  std::vector<StatePart> v_of_;
};

}  // namespace kestrel
