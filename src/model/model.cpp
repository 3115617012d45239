#include "src/model/model.h"

#include <algorithm>

#include "kernels/core/elementwise.h"
#include "kernels/core/profile.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/loss/loss.h"
#include "src/model/init.h"
#include "src/parallel/device_sums.h"

namespace kestrel {

Model::Model(const ModelConfig& c, const ExpertShare& share) : config_(c) {
  const int64_t D = c.hidden_size;
  const bool mixes = c.residual != ModelConfig::Residual::standard;
  embed_ =
      store_.declare(D, {matrix_member("model.embed_tokens.weight", c.vocab_size, D, weight_init(c), Rule::adamw)});
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string pre = text("model.layers.", l);
    const bool full = c.residual == ModelConfig::Residual::full_attnres;
    const bool block_start = c.residual == ModelConfig::Residual::block_attnres && l % c.attn_res_block_size == 0;
    sites_.push_back(declare_site(pre + ".input_layernorm", pre + ".self_attention_res", mixes, full || block_start));
    if (c.is_full_attention(l)) {
      auto layer = std::make_unique<MlaLayer>(c, store_, pre + ".self_attn");
      mla_.push_back(layer.get());
      sublayers_.push_back(std::move(layer));
    } else {
      sublayers_.push_back(std::make_unique<KdaLayer>(c, store_, pre + ".self_attn"));
    }
    sites_.push_back(declare_site(pre + ".post_attention_layernorm", pre + ".mlp_res", mixes, full));
    if (c.is_moe(l)) {
      auto layer = std::make_unique<MoeLayer>(c, store_, pre + ".block_sparse_moe", share);
      moe_.push_back(layer.get());
      moe_names_.push_back(pre + ".block_sparse_moe");
      sublayers_.push_back(std::move(layer));
    } else {
      sublayers_.push_back(std::make_unique<FfnLayer>(c, store_, pre + ".mlp", c.intermediate_size));
    }
  }
  sites_.push_back(declare_site("model.norm", "model.output_attn_res", mixes, false));
  if (!c.tie_word_embeddings) {
    head_ = store_.declare(D, {matrix_member("lm_head.weight", c.vocab_size, D, weight_init(c), Rule::adamw)});
  }
}

Model::Site Model::declare_site(const std::string& norm, const std::string& mix, bool mixes, bool closes) {
  const int64_t D = config_.hidden_size;
  Site site;
  site.closes = closes;
  site.out_norm =
      store_.declare(D, {vector_member(norm + ".weight", D, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
  if (mixes) {
    site.mix_norm =
        store_.declare(D, {vector_member(mix + "_norm.weight", D, {Init::Kind::ones}, Rule::adamw_no_decay)}, true);
    // A zero query weighs all sources alike: the stream starts as the plain residual sum over the number of rows.
    site.mix_query =
        store_.declare(D, {matrix_member(mix + "_proj.weight", 1, D, {Init::Kind::zeros}, Rule::adamw_no_decay)}, true);
  }
  return site;
}

void Model::allocate_state(Arena& arena, bool track_max_logit) {
  for (MoeLayer* m : moe_) m->balancer().allocate(arena);
  if (!track_max_logit) return;
  for (MlaLayer* m : mla_) m->track_max_logit(arena.keep({config_.num_attention_heads}, DType::f32, "balance"));
}

void Model::begin_step(Stream& s) {
  for (MoeLayer* m : moe_) m->balancer().begin_step(s);
  for (MlaLayer* m : mla_) {
    if (m->max_logit()) fill_zero(s, m->max_logit());  // only heads above tau > 0 are clipped
  }
}

void Model::pool_statistics(Stream& s, Communicator& ranks) {
  for (MoeLayer* m : moe_) m->balancer().pool(s, ranks);
  for (MlaLayer* m : mla_) max_over(s, ranks, m->max_logit());
}

void Model::apply_balance(Stream& s) {
  const PhaseRange phase(s, "update");
  for (MoeLayer* m : moe_) m->balancer().solve(s);
}

Pass Model::make_pass(Stream& s, const MicroBatch& batch, const PassOptions& options, bool training) {
  Pass pass(s);
  pass.B = batch.tokens.dim(0);
  pass.T = batch.tokens.dim(1);
  pass.dtype = options.dtype;
  pass.recompute = options.recompute;
  pass.batch_share = options.batch_share;
  pass.keep = pass.observe = training;
  if (config_.document_mask && batch.segment) {
    pass.document_start = s.arena->keep({pass.B, pass.T}, DType::i32, "documents");
    document_starts(s, pass.document_start, batch.segment);
  }
  return pass;
}

// The site's own vectors (h and y) are kept for backward only where nothing is recomputed.
ResidualSite Model::make_site(const Pass& pass, const Site& p, const std::vector<Tensor>& completed, Tensor prefix,
                              Tensor delta, bool keep_vectors) const {
  const int64_t N = pass.N(), D = config_.hidden_size;
  Arena& arena = *pass.s.arena;
  ResidualSite site;
  site.completed = completed;
  site.prefix_in = prefix;
  site.delta = delta;
  site.out_norm = p.out_norm->vector();
  site.eps = static_cast<float>(config_.rms_norm_eps);
  if (p.mix_norm && !completed.empty()) {
    site.mix_norm = p.mix_norm->vector();
    site.mix_query = p.mix_query->w;
    const int64_t S = static_cast<int64_t>(completed.size()) + 1;
    site.alpha = arena.keep({N, S}, DType::f32, "residual");
    site.mix_rstd = arena.keep({N, S}, DType::f32, "residual");
    site.h = keep_vectors ? arena.keep({N, D}, pass.dtype, "residual") : pass.s.temp({N, D}, pass.dtype);
  }
  site.rstd = arena.keep({N}, DType::f32, "residual");
  site.prefix = prefix && delta ? arena.keep({N, D}, pass.dtype, "residual") : (prefix ? prefix : delta);
  site.y = keep_vectors ? arena.keep({N, D}, pass.dtype, "residual") : pass.s.temp({N, D}, pass.dtype);
  return site;
}

void Model::embed(const Pass& pass, const MicroBatch& batch, Tensor out) {
  embedding_forward(pass.s, out, batch.tokens.view({pass.N()}), embed_->w);
}

ResidualSiteGrads Model::site_grads(const Site& p, const std::vector<Tensor>& dcompleted, size_t rows,
                                    Tensor dprefix) const {
  ResidualSiteGrads g;
  g.dcompleted.assign(dcompleted.begin(), dcompleted.begin() + static_cast<ptrdiff_t>(rows));
  g.dprefix = dprefix;
  g.dout_norm = p.out_norm->grad_vector();
  if (p.mix_norm) {
    g.dmix_norm = p.mix_norm->grad_vector();
    g.dmix_query = p.mix_query->g;
  }
  return g;
}

void Model::backward(const Pass& pass, const MicroBatch& batch, Tensor dx) {
  Stream& s = pass.s;
  ScratchScope scope(s);
  const int64_t N = pass.N(), D = config_.hidden_size;
  // fp32 accumulators: an early row collects a term from every later site.
  std::vector<Tensor> dcompleted;
  for (const Site& p : sites_) {
    if (!p.closes) continue;
    dcompleted.push_back(s.temp({N, D}));
    fill_zero(s, dcompleted.back());
  }
  Tensor dprefix = s.temp({N, D});
  fill_zero(s, dprefix);
  size_t rows = dcompleted.size();  // completed in front of the site in hand
  const auto site_of = [&](size_t i) {
    ResidualSite site = passages_[i];
    site.completed.assign(completed_.begin(), completed_.begin() + static_cast<ptrdiff_t>(rows));
    return site;
  };
  residual_site_backward(s, site_of(sublayers_.size()), site_grads(sites_.back(), dcompleted, rows, dprefix), dx);

  for (size_t i = sublayers_.size(); i-- > 0;) {
    ScratchScope inner(s);
    if (sites_[i].closes) --rows;
    ResidualSite site = site_of(i);
    if (pass.recompute != Recompute::none) {
      if (site.mixes()) {
        site.h = s.temp({N, D}, pass.dtype);
        residual_site_recompute_h(s, site);
      }
      site.y = s.temp({N, D}, pass.dtype);
      residual_site_recompute_y(s, site);
    }
    // The gradient of the prefix is the gradient of every sublayer output summed into it.
    Tensor dy = dprefix;
    if (pass.dtype != DType::f32) {
      // Where y is kept, that of the site behind is done with.
      dy = pass.recompute == Recompute::none ? passages_[i + 1].y : s.temp({N, D}, pass.dtype);
      copy_cast(s, dy, dprefix);
    }
    const Tensor dsite = dx;  // the head's gradient is done with
    sublayers_[i]->backward(pass, dsite, dy, site.y);
    // In front of a closing site lies the prefix that became a row: its gradient is what later sites left there.
    if (sites_[i].closes) dprefix = dcompleted[rows];
    residual_site_backward(s, site, site_grads(sites_[i], dcompleted, rows, dprefix), dsite);
  }
  embedding_backward(s, embed_->g, dprefix, batch.tokens.view({N}));
}

void Model::train(Stream& s, const MicroBatch& batch, Tensor losses, float grad_scale, const PassOptions& options) {
  const int64_t mark = s.arena->keep_mark();
  {
    ScratchScope scope(s);
    const Pass pass = make_pass(s, batch, options, /*training=*/true);
    Tensor x;
    {
      const PhaseRange phase(s, "forward");
      x = forward(pass, batch);
    }
    const PhaseRange phase(s, "backward");
    Tensor dx = s.temp({pass.N(), config_.hidden_size}, pass.dtype);
    linear_cross_entropy(s, losses, dx, head()->g, x, head()->w, batch.targets.view({pass.N()}), grad_scale);
    backward(pass, batch, dx);
  }
  s.arena->release_keep(mark);
}

void Model::evaluate(Stream& s, const MicroBatch& batch, Tensor losses, const PassOptions& options) {
  const int64_t mark = s.arena->keep_mark();
  {
    ScratchScope scope(s);
    const PhaseRange phase(s, "evaluate");
    const Pass pass = make_pass(s, batch, options, /*training=*/false);
    const Tensor x = forward(pass, batch);
    linear_cross_entropy(s, losses, {}, {}, x, head()->w, batch.targets.view({pass.N()}), 0.f);
  }
  s.arena->release_keep(mark);
}

void Model::logits(Stream& s, const MicroBatch& batch, Tensor logits, const PassOptions& options) {
  const int64_t mark = s.arena->keep_mark();
  {
    ScratchScope scope(s);
    const Pass pass = make_pass(s, batch, options, /*training=*/false);
    const Tensor x = forward(pass, batch);
    gemm(s, logits, x, Trans::no, head()->w, Trans::yes);
  }
  s.arena->release_keep(mark);
}

}  // namespace kestrel
