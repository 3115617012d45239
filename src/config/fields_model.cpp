// Rows of the `model` section: the network and its ablations.
#include "src/config/fields.h"

namespace kestrel {
namespace {

constexpr double kMaxVocabulary = 16777216;  // 2^24
constexpr double kMaxHeads = 65536;

void add_backbone(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "model.vocab_size", "Tokens in the vocabulary; every id in the data is below it.",
      [](auto& d) -> auto& { return d.config.model.vocab_size; })
      .between(1, kMaxVocabulary)
      .required("32768");
  add(
      "model.hidden_size", "Width d of the residual stream.",
      [](auto& d) -> auto& { return d.config.model.hidden_size; })
      .width(1)
      .required("1024");
  add(
      "model.num_hidden_layers", "Decoder layers.", [](auto& d) -> auto& { return d.config.model.num_hidden_layers; })
      .between(1, 10000)
      .required("12");
  add(
      "model.rms_norm_eps", "Epsilon of every RMSNorm but the two inside MLA.",
      [](auto& d) -> auto& { return d.config.model.rms_norm_eps; })
      .above(0)
      .below(1);
  add(
      "model.tie_word_embeddings", "Whether the output head is the embedding matrix.",
      [](auto& d) -> auto& { return d.config.model.tie_word_embeddings; });
  add(
      "model.residual",
      "Residual path: attention over the outputs of blocks of layers (K3), over the output of every sublayer, or the "
      "plain sum.",
      [](auto& d) -> auto& { return d.config.model.residual; });
  add(
      "model.attn_res_block_size", "Decoder layers in a block of `block_attnres` (12 layers are 24 sublayers).",
      [](auto& d) -> auto& { return d.config.model.attn_res_block_size; })
      .between(1, 10000);
  add(
      "model.document_mask",
      "Whether attention, convolution and KDA state stop at document borders. The shards must hold `document_starts`.",
      [](auto& d) -> auto& { return d.config.model.document_mask; });
  add(
      "model.initializer_range", "Standard deviation of the initial weight matrices.",
      [](auto& d) -> auto& { return d.config.model.initializer_range; })
      .above(0)
      .below(10);
  add(
      "model.scale_output_init",
      "Whether projections back into the residual stream start smaller, at initializer_range / sqrt(2 "
      "num_hidden_layers).",
      [](auto& d) -> auto& { return d.config.model.scale_output_init; });
}

void add_linear_attention(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "model.linear_attn_config.num_heads", "KDA heads.",
      [](auto& d) -> auto& { return d.config.model.linear_attn.num_heads; })
      .between(0, kMaxHeads)
      .default_is("required with KDA layers");
  add(
      "model.linear_attn_config.head_dim", "Width of a KDA head's keys and of its values (K = V).",
      [](auto& d) -> auto& { return d.config.model.linear_attn.head_dim; })
      .between(0, 1024)
      .note("A head's state is head_dim x head_dim floats; use more heads for more width.")
      .default_is("required with KDA layers");
  add(
      "model.linear_attn_config.short_conv_kernel_size",
      "Taps of the causal convolution on q, k and v, the current token included.",
      [](auto& d) -> auto& { return d.config.model.linear_attn.short_conv_kernel_size; })
      .between(1, 8)
      .note("The convolution kernels hold at most 8 taps.");
  add(
      "model.linear_attn_config.use_full_rank_gate",
      "Output gate of KDA: one full matrix, or the low-rank pair g_a_proj, g_b_proj of rank head_dim.",
      [](auto& d) -> auto& { return d.config.model.linear_attn.use_full_rank_gate; });
  add(
      "model.linear_attn_config.gate_lower_bound",
      "Lower bound of the log decay: g = bound * sigmoid(exp(A_log) z). Absent means -5 here; Hugging Face's class "
      "takes "
      "an absent bound as softplus, so write null when copying such a model.",
      [](auto& d) -> auto& { return d.config.model.linear_attn.gate_lower_bound; })
      .between(-5.9, 0)
      .below(0)
      .note(
          "Below -5.9 the decay over a tile of 16 tokens leaves the range of a float; use null for a gate without a "
          "bound.")
      .null_is("the unbounded gate g = -exp(A_log) softplus(z)");
  add(
      "model.linear_attn_config.full_attn_layers",
      "Layers with MLA, counted from 1, ascending; all others are KDA. [] is a model of KDA alone.",
      [](auto& d) -> auto& { return d.full_attn_layers; })
      .between(1, 10000)
      .null_is("as kda_layers or full_attn_every say")
      .default_is("one of full_attn_layers, kda_layers and full_attn_every is required");
  add(
      "model.linear_attn_config.kda_layers", "Layers with KDA, counted from 1, ascending; all others are MLA.",
      [](auto& d) -> auto& { return d.kda_layers; })
      .between(1, 10000)
      .null_is("the layers that full_attn_layers leaves")
      .default_is("the layers that are not MLA");
  add(
      "model.linear_attn_config.full_attn_every",
      "Short form of full_attn_layers: MLA in every n-th layer and in the last one. 4 in 6 layers is [4, 6].",
      [](auto& d) -> auto& { return d.full_attn_every; })
      .between(1, 10000)
      .null_is("as the lists say")
      .input_only();
}

void add_mla(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "model.num_attention_heads", "MLA heads.", [](auto& d) -> auto& { return d.config.model.num_attention_heads; })
      .between(0, kMaxHeads)
      .default_is("required with MLA layers");
  add(
      "model.q_lora_rank", "Rank of the query's low-rank pair q_a_proj, q_b_proj.",
      [](auto& d) -> auto& { return d.config.model.q_lora_rank; })
      .width(1)
      .null_is("one plain q_proj");
  add(
      "model.kv_lora_rank", "Width of the latent that keys and values are made from.",
      [](auto& d) -> auto& { return d.config.model.kv_lora_rank; })
      .width(0)
      .default_is("required with MLA layers");
  add(
      "model.qk_nope_head_dim", "Width of the part of q and k that each head has to itself.",
      [](auto& d) -> auto& { return d.config.model.qk_nope_head_dim; })
      .between(0, 1024)
      .default_is("required with MLA layers");
  add(
      "model.qk_rope_head_dim",
      "Width of the part of k shared by all heads, and of q's counterpart. Despite its name it is never rotated.",
      [](auto& d) -> auto& { return d.config.model.qk_rope_head_dim; })
      .between(0, 1024)
      .default_is("required with MLA layers");
  add(
      "model.v_head_dim", "Width of a head's values.", [](auto& d) -> auto& { return d.config.model.v_head_dim; })
      .between(0, 1024)
      .default_is("required with MLA layers");
  add(
      "model.mla_use_output_gate", "Whether MLA's output is multiplied by sigmoid(g_proj x), channel by channel.",
      [](auto& d) -> auto& { return d.config.model.mla_use_output_gate; });
  add(
      "model.mla_norm_eps", "Epsilon of the two norms inside MLA (q_a_layernorm, kv_a_layernorm).",
      [](auto& d) -> auto& { return d.config.model.mla_norm_eps; })
      .above(0)
      .below(1);
}

void add_feed_forward(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "model.intermediate_size", "Width of a dense feed-forward layer.",
      [](auto& d) -> auto& { return d.config.model.intermediate_size; })
      .width(0)
      .default_is("required with dense layers");
  add(
      "model.first_k_dense_replace", "The first so many layers are dense.",
      [](auto& d) -> auto& { return d.config.model.first_k_dense_replace; })
      .between(0, 10000);
  add(
      "model.moe_layer_freq", "Past the first dense ones, layer l (from 0) has experts where l is a multiple of this.",
      [](auto& d) -> auto& { return d.config.model.moe_layer_freq; })
      .between(1, 10000);
  add(
      "model.num_experts", "Routed experts of a layer; 0 makes every layer dense.",
      [](auto& d) -> auto& { return d.config.model.num_experts; })
      .between(0, 16384);
  add(
      "model.num_experts_per_token", "Routed experts k that a token uses (with quantile_dynamic: on average).",
      [](auto& d) -> auto& { return d.config.model.num_experts_per_token; })
      .between(0, 1024)
      .default_is("required with experts");
  add(
      "model.num_shared_experts",
      "Experts that every token uses, at full width, as one MLP of width num_shared_experts * moe_intermediate_size.",
      [](auto& d) -> auto& { return d.config.model.num_shared_experts; })
      .between(0, 1024);
  add(
      "model.moe_intermediate_size", "Width of an expert.",
      [](auto& d) -> auto& { return d.config.model.moe_intermediate_size; })
      .width(0)
      .default_is("required with experts");
  add(
      "model.routed_expert_hidden_size", "Latent width that tokens are projected to for the routed experts.",
      [](auto& d) -> auto& { return d.config.model.routed_expert_hidden_size; })
      .width(1)
      .null_is("experts at full width");
  add(
      "model.latent_moe_use_norm",
      "Whether the combined expert output is normalised before it leaves the latent space.",
      [](auto& d) -> auto& { return d.config.model.latent_moe_use_norm; });
  add(
      "model.moe_renormalize", "Whether the weights of a token's chosen experts are divided by their sum.",
      [](auto& d) -> auto& { return d.config.model.moe_renormalize; });
  add(
      "model.routed_scaling_factor", "Factor on the weights of routed experts.",
      [](auto& d) -> auto& { return d.config.model.routed_scaling_factor; })
      .above(0);
  add(
      "model.hidden_act", "Gated activation of every feed-forward: SiTU-GLU (soft-capped) or SwiGLU.",
      [](auto& d) -> auto& { return d.config.model.hidden_act; });
  add(
      "model.activation_situ_beta", "Soft cap of SiTU's gate.",
      [](auto& d) -> auto& { return d.config.model.activation_situ_beta; })
      .above(0);
  add(
      "model.activation_situ_linear_beta", "Soft cap of SiTU's linear side.",
      [](auto& d) -> auto& { return d.config.model.activation_situ_linear_beta; })
      .above(0);
}

void add_balancing(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "model.balancing.method",
      "K3's quantile of the global batch with a fixed k; per-expert thresholds without a fixed k; the sign rule; an "
      "auxiliary loss; or nothing.",
      [](auto& d) -> auto& { return d.config.model.balancing.method; });
  add(
      "model.balancing.bins", "Bins of the `histogram` estimator.",
      [](auto& d) -> auto& { return d.config.model.balancing.bins; })
      .between(2, 1000000);
  add(
      "model.balancing.gain", "`quantile`: share of the way from the old bias to the new quantile taken each step.",
      [](auto& d) -> auto& { return d.config.model.balancing.gain; })
      .above(0)
      .between(0, 1)
      .note("Above 1 the bias overshoots and oscillates; below 1 it averages over 1/gain steps.");
  add(
      "model.balancing.ema", "`quantile_dynamic`: weight of the old threshold in the new one.",
      [](auto& d) -> auto& { return d.config.model.balancing.ema; })
      .between(0, 1)
      .below(1)
      .default_is("0.9 with `quantile_dynamic`, else 0");
  add(
      "model.balancing.sign_rate", "`sign`: what a step adds to or takes from each bias.",
      [](auto& d) -> auto& { return d.config.model.balancing.sign_rate; })
      .above(0);
  add(
      "model.balancing.aux_coefficient", "`aux_loss`: weight of the balancing loss.",
      [](auto& d) -> auto& { return d.config.model.balancing.aux_coefficient; })
      .above(0);
  add(
      "model.balancing.estimator",
      "`quantile`, `quantile_dynamic`: integer counts in bins, sorting the whole batch, or the mean of the "
      "micro-batches' quantiles.",
      [](auto& d) -> auto& { return d.config.model.balancing.estimator; });
}

}  // namespace

std::vector<Field> model_fields() {
  std::vector<Field> t;
  add_backbone(t);
  add_linear_attention(t);
  add_mla(t);
  add_feed_forward(t);
  add_balancing(t);
  return t;
}

}  // namespace kestrel
