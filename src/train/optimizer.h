// The optimizer of a whole model: which tensor is updated by what, the state, and one step.
//
// Muon owns the matrices (per head where the layer says so and optimizer.per_head is on); embeddings, classifier,
// router, beta projection and convolutions are AdamW's with decay; norms, A_log, dt_bias and depth queries AdamW's
// without.  The balance bias belongs to nobody here.  State: the momentum m for every trained element, and v where
// AdamW works.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/core/transfer.h"
#include "kernels/optimizer/optimizer.h"
#include "src/model/model.h"

namespace kestrel {

class Optimizer {
 public:
  // `planned`: no state is allocated; only `plan` may be called.
  Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device, bool planned = false);

  // Bytes of state for a store that need not be allocated.
  static int64_t state_bytes(const ParameterStore& store, const OptimizerConfig& config);

  // Takes the scratch of measure and step from a planner.
  void plan(Stream& s);
  // Queues what the host must know before the step: after the next wait, gradient_norm and clip_heads know it.
  void measure(Stream& s, const Model& model);
  // L2 norm over all gradients at the last `measure`, non-finite if any element was.
  double gradient_norm() const;
  // min(1, grad_clip / (norm + 1e-6)); 1 without clipping.
  float clip_scale(double norm) const;
  // One update with gradients times grad_scale; `update` counts applied updates from 1 (AdamW's bias correction).
  void step(Stream& s, int64_t update, double lr, float grad_scale);
  // After a step: heads whose largest logit at the last `measure` exceeded optimizer.qk_clip are scaled down.  Returns
  // their number.
  int64_t clip_heads(Stream& s, Model& model);
  bool clips_heads() const { return config_.qk_clip.has_value(); }

  // Every state tensor by name ("optimizer.m.<parameter>", "optimizer.v.<parameter>") with the parameter's shape.
  void for_each_state(
      const std::function<void(const std::string& name, const std::vector<int64_t>& shape, Tensor t)>& fn) const;

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
  Tensor state_of(const Tensor& flat, const Block& block) const {
    return flat.slice(block.offset, block.numel()).view({block.rows, block.cols});
  }

  void queue_square_sum(Stream& s);

  ParameterStore& store_;
  OptimizerConfig config_;
  Device device_;
  std::unique_ptr<Arena> memory_;
  Tensor m_, v_;
  Tensor square_sum_;                               // [1] F64
  PinnedBuffer square_sum_host_, max_logits_host_;  // [1] F64; [MLA layers, heads] F32, made when first measured
  std::vector<MuonTask> muon_;
  std::vector<AdamWTask> adamw_;
  std::vector<std::pair<const Member*, Tensor>> v_of_;
};

}  // namespace kestrel
