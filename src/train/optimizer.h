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

#include "kernels/optimizer/optimizer.h"
#include "src/model/model.h"

namespace kestrel {

class Optimizer {
 public:
  Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device);

  // Bytes of state for a store that need not be allocated.
  static int64_t state_bytes(const ParameterStore& store, const OptimizerConfig& config);

  // Takes the scratch of gradient_norm, step and clip_heads from a planner.
  void plan(Stream& s);
  // L2 norm over all gradients, non-finite if any element is.
  double gradient_norm(Stream& s);
  // min(1, grad_clip / (norm + 1e-6)); 1 without clipping.
  float clip_scale(double norm) const;
  // One update with gradients times grad_scale; `update` counts applied updates from 1 (AdamW's bias correction).
  void step(Stream& s, int64_t update, double lr, float grad_scale);
  // After a step: heads whose largest logit of the step exceeded optimizer.qk_clip are scaled down.  Returns their
  // number.
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

  ParameterStore& store_;
  OptimizerConfig config_;
  std::unique_ptr<Arena> memory_;
  Tensor m_, v_;
  std::vector<MuonTask> muon_;
  std::vector<AdamWTask> adamw_;
  std::vector<std::pair<const Member*, Tensor>> v_of_;
};

}  // namespace kestrel
