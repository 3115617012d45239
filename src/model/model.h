// The K3-style decoder: embedding, layers of two sublayers behind residual sites, output norm, classifier.
//
// The residual stream of all three kinds is one protocol (kernels/attn_res/attn_res.h).  State: `completed` rows and an
// open `prefix`.  In front of every sublayer a site mixes {completed rows, prefix} and normalises; then
//   block_attnres   at the attention site of layer l with l % attn_res_block_size == 0 the prefix is closed: it becomes
//   a row full_attnres    every site closes the prefix: each sublayer output is a source of its own standard never: the
//   site is just the pre-norm
// The embedding is the first prefix.  The mix runs before the prefix is closed, so a row is never counted twice.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attn_res/attn_res.h"
#include "src/model/kda_layer.h"
#include "src/model/mla_layer.h"
#include "src/model/moe_layer.h"

namespace kestrel {

// One micro-batch on the stream's device.
struct MicroBatch {
  Tensor tokens;   // I32 [B,T]
  Tensor targets;  // I32 [B,T], -100: no target
  Tensor segment;  // I32 [B,T] document ids, or empty; used only with model.document_mask

  static MicroBatch allocate(Arena& arena, int64_t B, int64_t T) {
    const auto ids = [&] { return arena.keep({B, T}, DType::i32, "batch"); };
    return {ids(), ids(), ids()};
  }
  // Rows [first, first + count) of a batch that has segments.
  MicroBatch rows(int64_t first, int64_t count) const {
    return {tokens.slice(first, count), targets.slice(first, count), segment.slice(first, count)};
  }
};

class Model {
 public:
  // `share`: the experts that this rank holds.
  explicit Model(const ModelConfig& config, const ExpertShare& share = {});

  const ModelConfig& config() const { return config_; }
  // A batch with documents turns the mask on where the config left it open (parity files).
  void set_document_mask(bool on) { config_.document_mask = on; }
  ParameterStore& parameters() { return store_; }
  const ParameterStore& parameters() const { return store_; }

  // Loads, histograms and such: small state beside the parameters.  Call once, before the first pass.
  void allocate_state(Arena& arena, bool track_max_logit);

  struct PassOptions {
    DType dtype = DType::f32;
    Recompute recompute = Recompute::none;
    double batch_share = 1.0;
  };
  // Forward and backward of one micro-batch; gradients are added to the parameters'.  losses [B*T] F32: nats per
  // target. grad_scale is 1 / valid targets of the global batch.
  void train(Stream& s, const MicroBatch& batch, Tensor losses, float grad_scale, const PassOptions& options);
  // Forward only.  Statistics and gradients are left alone.
  void evaluate(Stream& s, const MicroBatch& batch, Tensor losses, const PassOptions& options);
  // logits [B*T, vocab] F32.
  void logits(Stream& s, const MicroBatch& batch, Tensor logits, const PassOptions& options);

  void begin_step(Stream& s);  // clears the step's statistics
  // Collective.  The step's statistics - loads, margins, largest logits - become those of all ranks.
  void pool_statistics(Stream& s, Communicator& ranks);
  void apply_balance(Stream& s);  // the biases of the next step; only after an applied update

  const std::vector<MoeLayer*>& moe_layers() const { return moe_; }
  const std::vector<std::string>& moe_names() const { return moe_names_; }
  const std::vector<MlaLayer*>& mla_layers() const { return mla_; }
  Block* embedding() { return embed_; }
  Block* head() { return head_ ? head_ : embed_; }
  const Sublayer* sublayer(int64_t i) const { return sublayers_[static_cast<size_t>(i)].get(); }

 private:
  friend class Decoder;

  struct Site {  // parameters of one residual site
    Block *out_norm = nullptr, *mix_norm = nullptr, *mix_query = nullptr;
    bool closes = false;  // its prefix becomes a completed row
  };

  Site declare_site(const std::string& norm, const std::string& mix, bool mixes, bool closes);
  ResidualSite make_site(const Pass& pass, const Site& p, const std::vector<Tensor>& completed, Tensor prefix,
                         Tensor delta, bool keep_vectors) const;
  Pass make_pass(Stream& s, const MicroBatch& batch, const PassOptions& options, bool training);
  // -> [N,D], the classifier's input.  `apply(i, out, in)` runs sublayer i.
  template <class Apply>
  Tensor forward(const Pass& pass, const MicroBatch& batch, Apply&& apply);
  Tensor forward(const Pass& pass, const MicroBatch& batch) {
    return forward(pass, batch, [&](size_t i, Tensor out, Tensor in) { sublayers_[i]->forward(pass, out, in); });
  }
  void embed(const Pass& pass, const MicroBatch& batch, Tensor out);
  void backward(const Pass& pass, const MicroBatch& batch, Tensor dx);
  ResidualSiteGrads site_grads(const Site& p, const std::vector<Tensor>& dcompleted, size_t rows, Tensor dprefix) const;

  ModelConfig config_;
  ParameterStore store_;
  Block *embed_ = nullptr, *head_ = nullptr;
  std::vector<Site> sites_;  // 2 per layer, then the output site
  std::vector<std::unique_ptr<Sublayer>> sublayers_;
  std::vector<MoeLayer*> moe_;
  std::vector<std::string> moe_names_;
  std::vector<MlaLayer*> mla_;
  // What forward leaves to backward.  The completed rows of every site are the first ones of one list: a copy in each
  // would grow with the square of the depth.
  std::vector<Tensor> completed_;
  std::vector<ResidualSite> passages_;
};

template <class Apply>
Tensor Model::forward(const Pass& pass, const MicroBatch& batch, Apply&& apply) {
  Stream& s = pass.s;
  const int64_t N = pass.N(), D = config_.hidden_size;
  const bool keep_vectors = pass.recompute == Recompute::none;
  passages_.clear();
  Tensor prefix = s.arena->keep({N, D}, pass.dtype, "residual"), delta;
  embed(pass, batch, prefix);
  completed_.clear();
  for (size_t i = 0; i <= sublayers_.size(); ++i) {
    const bool last = i == sublayers_.size();
    // The sublayer's output outlives its scratch; it is itself a source where its site closes the prefix.
    Tensor out = last ? Tensor{} : s.arena->keep({N, D}, pass.dtype, "residual");
    ScratchScope scope(s);
    ResidualSite site = make_site(pass, sites_[i], completed_, prefix, delta, keep_vectors || last);
    residual_site_forward(s, site);
    site.completed = {};
    passages_.push_back(site);
    if (last) break;
    prefix = site.prefix;
    if (sites_[i].closes) {
      completed_.push_back(prefix);
      prefix = {};
    }
    apply(i, out, site.y);
    delta = out;
  }
  return passages_.back().y;
}

}  // namespace kestrel
