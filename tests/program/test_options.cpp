// No option of the model, of balancing or of the optimizer is ignored: each is flipped against one base run, and the
// list of parameters, the loss, the balance bias or the final weights must change.
#include "program.h"
#include "src/train/trainer.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

// What four steps of a run leave, as far as options can show in it.
struct Trace {
  std::vector<std::string> parameters;
  std::vector<double> losses;
  std::vector<float> biases, weights;
  bool operator==(const Trace&) const = default;
};

class Options : public ::testing::Test {
 protected:
  Options() { write_tokens(dir_ / "train.safetensors", 3000); }

  json base() const {
    json run = tiny_run(dir_ / "train.safetensors", dir_ / "run");
    run["train"]["precision"] = "fp32";
    run["model"]["num_experts"] = 8;
    run["model"]["attn_res_block_size"] = 1;
    return run;
  }
  Trace trace(const json& run) const {
    Trainer trainer(parse_run_config(run.dump(), "options"));
    Trace t;
    for (int i = 0; i < 4; ++i) t.losses.push_back(trainer.train_step().loss);
    trainer.model().parameters().for_each([&](const NamedParameter& p) {
      t.parameters.push_back(p.name);
      const Tensor w = p.rows_of(p.member->block->master);
      auto& to = p.member->rule == Rule::balance ? t.biases : t.weights;
      to.insert(to.end(), w.f32(), w.f32() + w.numel());
    });
    return t;
  }
  TempDir dir_;
};

struct Flip {
  std::string pointer, value;  // JSON
  std::string extra = "{}";    // merged into the run first, into both sides
};

const std::vector<Flip>& flips() {
  static const std::vector<Flip> all = {
      {"/model/residual", R"("full_attnres")"},
      {"/model/residual", R"("standard")"},
      {"/model/attn_res_block_size", "3"},
      {"/model/linear_attn_config/gate_lower_bound", "-2.5"},
      {"/model/linear_attn_config/gate_lower_bound", "null"},
      {"/model/linear_attn_config/use_full_rank_gate", "false"},
      {"/model/linear_attn_config/short_conv_kernel_size", "3"},
      {"/model/linear_attn_config/full_attn_every", "3"},
      {"/model/mla_use_output_gate", "false"},
      {"/model/q_lora_rank", "null"},
      {"/model/mla_norm_eps", "0.01"},
      {"/model/rms_norm_eps", "0.01"},
      {"/model/routed_expert_hidden_size", "null"},
      {"/model/routed_expert_hidden_size", "16"},
      {"/model/latent_moe_use_norm", "false"},
      {"/model/num_shared_experts", "0"},
      {"/model/num_shared_experts", "2"},
      {"/model/first_k_dense_replace", "2"},
      {"/model/moe_layer_freq", "2"},
      {"/model/num_experts", "0"},
      {"/model/num_experts_per_token", "3"},
      {"/model/moe_renormalize", "false"},
      {"/model/routed_scaling_factor", "2.0"},
      {"/model/hidden_act", R"("silu")"},
      {"/model/activation_situ_beta", "0.05"},
      {"/model/activation_situ_linear_beta", "0.05"},
      {"/model/tie_word_embeddings", "true"},
      {"/model/document_mask", "true"},
      {"/model/initializer_range", "0.03"},
      {"/model/scale_output_init", "true"},
      {"/model/balancing/method", R"("quantile_dynamic")"},
      {"/model/balancing/method", R"("sign")"},
      {"/model/balancing/method", R"("aux_loss")"},
      {"/model/balancing/method", R"("none")"},
      {"/model/balancing/bins", "10"},
      {"/model/balancing/gain", "0.5"},
      {"/model/balancing/estimator", R"("exact")"},
      {"/model/balancing/estimator", R"("micro_mean")"},
      {"/model/balancing/ema", "0.5", R"({"model":{"balancing":{"method":"quantile_dynamic"}}})"},
      {"/model/balancing/estimator", R"("exact")", R"({"model":{"balancing":{"method":"quantile_dynamic"}}})"},
      {"/model/balancing/sign_rate", "0.01", R"({"model":{"balancing":{"method":"sign"}}})"},
      {"/model/balancing/aux_coefficient", "0.5", R"({"model":{"balancing":{"method":"aux_loss"}}})"},
      {"/data/sequence_length", "20"},
      {"/data/shuffle", "false"},
      {"/data/seed", "7"},
      {"/train/seed", "7"},
      {"/optimizer/type", R"("adamw")"},
      {"/optimizer/per_head", "false"},
      {"/optimizer/weight_decay", "0.5"},
      {"/optimizer/grad_clip", "1e-4", R"({"optimizer":{"type":"adamw","eps":1e-4}})"},
      {"/optimizer/grad_clip", "null"},
      {"/optimizer/momentum", "0.5"},
      {"/optimizer/nesterov", "false"},
      {"/optimizer/newton_schulz_steps", "3"},
      {"/optimizer/beta1", "0.5"},
      {"/optimizer/beta2", "0.5"},
      {"/optimizer/eps", "1e-3"},
      {"/optimizer/qk_clip", "1e-4"},
      {"/optimizer/muon_lr_scale", "0.4"},
      {"/schedule/kind", R"("constant")"},
      {"/schedule/peak_lr", "0.01"},
      {"/schedule/min_lr", "0.004"},
      {"/schedule/warmup_steps", "1"},
  };
  return all;
}

}  // namespace

TEST_F(Options, EachOneChangesSomething) {
  std::map<std::string, Trace> references;
  for (const Flip& f : flips()) {
    json run = base();
    run.merge_patch(json::parse(f.extra));
    if (!references.count(f.extra)) references[f.extra] = trace(run);
    // A null is a value here, which a merge patch could not carry.
    run[json::json_pointer(f.pointer)] = json::parse(f.value);
    EXPECT_FALSE(trace(run) == references[f.extra]) << f.pointer << " = " << f.value << " changed nothing";
  }
}

TEST_F(Options, TheSameRunTwiceIsTheSame) {
  EXPECT_TRUE(trace(base()) == trace(base()));
}

// Balancing reaches the router only through the bias: it must be there, centred for the quantile form, untouched for
// `none`.
TEST_F(Options, BalancingMovesTheBiasAsTheMethodSays) {
  const Trace quantile = trace(base());
  double sum = 0, most = 0;
  for (float b : quantile.biases) {
    sum += b;
    most = std::max(most, std::fabs(static_cast<double>(b)));
  }
  EXPECT_GT(most, 1e-3);
  EXPECT_LT(std::fabs(sum), 1e-5);  // mean-centred per layer, fp32
  json none = base();
  none["model"]["balancing"] = {{"method", "none"}};
  for (float b : trace(none).biases) EXPECT_EQ(b, 0.f);
}

TEST_F(Options, RecomputationChangesNoBitOfARun) {
  const Trace reference = trace(base());
  for (const char* level : {"pointwise", "block"}) {
    json run = base();
    run["train"]["recompute"] = level;
    EXPECT_TRUE(trace(run) == reference) << level;
  }
}
