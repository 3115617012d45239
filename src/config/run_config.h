// One run file as typed structs.  fields.h has the table that fills them: every field's type, range, default and
// meaning; `kestrel config --reference` prints it.  A value of these types has passed every check of checks.h: nothing
// is left to validate but what depends on the machine (device, precision, world size) and on files.
//
// Names are those of the file.  The model section uses the names of the published K3 `text_config`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kestrel {

// How a step's loads become the next step's router bias (kernels/router/balancing.h).
struct BalancingConfig {
  enum class Method { quantile, quantile_dynamic, sign, aux_loss, none };
  enum class Estimator { histogram, exact, micro_mean };

  Method method = Method::quantile;
  int64_t bins = 1000;                         // histogram estimator
  double gain = 1.0;                           // quantile: b' = b + gain (b_hat - b); (0, 1]
  double ema = 0.0;                            // quantile_dynamic: b' = ema b + (1 - ema) b_hat; there 0.9 when absent
  double sign_rate = 1e-3;                     // sign: step of the bias
  double aux_coefficient = 1e-2;               // aux_loss: weight of the loss
  Estimator estimator = Estimator::histogram;  // quantile and quantile_dynamic

  bool operator==(const BalancingConfig&) const = default;
};

struct ModelConfig {
  enum class HiddenAct { situ, silu };
  enum class Residual { block_attnres, full_attnres, standard };

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  double rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;

  struct LinearAttn {  // `linear_attn_config`
    int64_t num_heads = 0;
    int64_t head_dim = 0;  // K = V
    int64_t short_conv_kernel_size = 4;
    bool use_full_rank_gate = true;                 // false: g_a_proj, g_b_proj of rank head_dim
    std::optional<double> gate_lower_bound = -5.0;  // nullopt: the unbounded softplus gate
    bool operator==(const LinearAttn&) const = default;
  } linear_attn;
  std::vector<int64_t> full_attn_layers;  // `linear_attn_config.full_attn_layers`, resolved: 1-based, ascending

  // MLA; zeros are possible only in a model without MLA layers.
  int64_t num_attention_heads = 0;
  std::optional<int64_t> q_lora_rank;  // nullopt: one plain q_proj
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // width of the key part shared by the heads; never rotated
  int64_t v_head_dim = 0;
  bool mla_use_output_gate = true;
  double mla_norm_eps = 1e-6;

  // Feed-forward.
  int64_t intermediate_size = 0;  // dense layers; 0 is possible only without dense layers
  int64_t first_k_dense_replace = 1;
  int64_t moe_layer_freq = 1;
  int64_t num_experts = 0;  // 0: every layer is dense
  int64_t num_experts_per_token = 0;
  int64_t num_shared_experts = 0;  // one fused MLP of width num_shared_experts * moe_intermediate_size
  int64_t moe_intermediate_size = 0;
  std::optional<int64_t> routed_expert_hidden_size;  // latent width; nullopt: experts at full width
  bool latent_moe_use_norm = true;
  bool moe_renormalize = true;
  double routed_scaling_factor = 1.0;
  HiddenAct hidden_act = HiddenAct::situ;
  double activation_situ_beta = 4.0;
  double activation_situ_linear_beta = 25.0;
  BalancingConfig balancing;

  Residual residual = Residual::block_attnres;
  int64_t attn_res_block_size = 12;  // decoder layers in a block
  bool document_mask = false;        // attention, convolution and KDA state stop at document borders

  double initializer_range = 0.02;
  bool scale_output_init = false;  // output projections start at initializer_range / sqrt(2 num_hidden_layers)

  bool operator==(const ModelConfig&) const = default;

  // `layer` counts from 0.
  bool is_full_attention(int64_t layer) const;
  bool is_moe(int64_t layer) const;
  int64_t num_full_attention_layers() const { return static_cast<int64_t>(full_attn_layers.size()); }
  int64_t num_kda_layers() const { return num_hidden_layers - num_full_attention_layers(); }
  int64_t num_moe_layers() const;
  int64_t num_dense_layers() const { return num_hidden_layers - num_moe_layers(); }
  std::vector<int64_t> kda_layers() const;                                     // 1-based, ascending
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }  // of MLA
  int64_t shared_width() const { return num_shared_experts * moe_intermediate_size; }
  int64_t expert_input_size() const { return routed_expert_hidden_size.value_or(hidden_size); }
};

struct DataConfig {
  std::vector<std::string> train;       // shard files or globs, in this order
  std::vector<std::string> validation;  // same; may be empty
  std::optional<std::string> tokenizer;
  int64_t sequence_length = 0;  // T: rows are windows of T + 1 tokens at stride T
  bool shuffle = true;
  int64_t seed = 0;

  bool operator==(const DataConfig&) const = default;
};

struct TrainConfig {
  enum class DeviceChoice { automatic, cuda, cpu };  // `auto`: a GPU where there is one
  enum class Precision { bf16, fp32 };
  enum class Recompute { none, pointwise, block };

  std::optional<int64_t> steps;  // exactly one of steps and tokens is set; RunConfig::total_steps() has the answer
  std::optional<int64_t> tokens;
  int64_t global_batch_size = 0;  // rows of one optimizer step, over all ranks
  int64_t micro_batch_size = 1;   // rows of one forward and backward on one rank
  int64_t seed = 0;               // of the initial weights
  DeviceChoice device = DeviceChoice::automatic;
  Precision precision = Precision::bf16;  // of weights and activations on a GPU; a CPU computes in fp32
  std::optional<std::string> init_from;   // directory with model.safetensors or an index
  Recompute recompute = Recompute::none;

  bool operator==(const TrainConfig&) const = default;
};

struct OptimizerConfig {
  enum class Type { muon, adamw };

  Type type = Type::muon;
  bool per_head = true;
  double weight_decay = 0.1;
  std::optional<double> grad_clip = 1.0;  // nullopt: no clipping
  double momentum = 0.95;
  bool nesterov = true;
  int64_t newton_schulz_steps = 5;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  std::optional<double> qk_clip;  // tau; nullopt: off
  double muon_lr_scale = 0.2;     // update = muon_lr_scale * sqrt(max(rows, columns)) * orthogonal factor

  bool operator==(const OptimizerConfig&) const = default;
};

struct ScheduleConfig {
  enum class Kind { cosine, wsd, constant };

  Kind kind = Kind::cosine;
  double peak_lr = 0.0;
  double min_lr = 0.0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // wsd

  bool operator==(const ScheduleConfig&) const = default;
};

struct ParallelConfig {  // data parallelism is what is left of the world size
  int64_t expert = 1;
  int64_t context = 1;
  int64_t pipeline = 1;
  int64_t zero_stage = 1;

  bool operator==(const ParallelConfig&) const = default;
};

struct CheckpointConfig {
  enum class Resume { automatic, never, must };  // `auto`: the newest good checkpoint; none at all: from the start

  std::string dir;         // default: <log.dir>/checkpoints
  int64_t every = 1000;    // steps; 0: only at the end and on a stop signal
  int64_t keep = 3;        // newest ones kept; 0: all
  int64_t keep_every = 0;  // steps whose multiples are never deleted; 0: none
  Resume resume = Resume::automatic;

  bool operator==(const CheckpointConfig&) const = default;
};

struct EvalConfig {
  int64_t every = 0;     // steps; 0: never
  int64_t batches = 16;  // micro-batches of one evaluation over all ranks; 0: the whole validation set

  bool operator==(const EvalConfig&) const = default;
};

struct LogConfig {
  std::string dir;    // the run directory; default: runs/<name of the run file>
  int64_t every = 1;  // steps between lines of metrics.jsonl
  bool tensorboard = false;

  bool operator==(const LogConfig&) const = default;
};

struct RunConfig {
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  ParallelConfig parallel;
  CheckpointConfig checkpoint;
  EvalConfig eval;
  LogConfig log;

  bool operator==(const RunConfig&) const = default;

  int64_t tokens_per_step() const { return train.global_batch_size * data.sequence_length; }
  int64_t total_steps() const;  // train.steps, or the steps that see at least train.tokens
};

// Spellings of the enumerations in the file, in order.
constexpr auto names_of(BalancingConfig::Method) {
  return std::array<std::string_view, 5>{"quantile", "quantile_dynamic", "sign", "aux_loss", "none"};
}
constexpr auto names_of(BalancingConfig::Estimator) {
  return std::array<std::string_view, 3>{"histogram", "exact", "micro_mean"};
}
constexpr auto names_of(ModelConfig::HiddenAct) {
  return std::array<std::string_view, 2>{"situ", "silu"};
}
constexpr auto names_of(ModelConfig::Residual) {
  return std::array<std::string_view, 3>{"block_attnres", "full_attnres", "standard"};
}
constexpr auto names_of(TrainConfig::DeviceChoice) {
  return std::array<std::string_view, 3>{"auto", "cuda", "cpu"};
}
constexpr auto names_of(TrainConfig::Precision) {
  return std::array<std::string_view, 2>{"bf16", "fp32"};
}
constexpr auto names_of(TrainConfig::Recompute) {
  return std::array<std::string_view, 3>{"none", "pointwise", "block"};
}
constexpr auto names_of(OptimizerConfig::Type) {
  return std::array<std::string_view, 2>{"muon", "adamw"};
}
constexpr auto names_of(ScheduleConfig::Kind) {
  return std::array<std::string_view, 3>{"cosine", "wsd", "constant"};
}
constexpr auto names_of(CheckpointConfig::Resume) {
  return std::array<std::string_view, 3>{"auto", "never", "must"};
}
// to_string(ModelConfig::Residual::standard) -> "standard"
template <class E>
requires std::is_enum_v<E>
constexpr std::string_view to_string(E value) {
  return names_of(value)[static_cast<size_t>(value)];
}

// Reads `path`, what it inherits through "base" (relative to the file that says so) and `overrides`
// ("train.steps=200": the value is JSON, else a string), and checks everything.  Throws ConfigError.
RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides = {});

// The same from text; `name` stands for the file in messages, and "base" is relative to its folder.
RunConfig parse_run_config(const std::string& json_text, const std::string& name,
                           const std::vector<std::string>& overrides = {});

// A model section alone, as in a published config.json's `text_config`.  An absent gate_lower_bound is -5 here; Hugging
// Face's class takes it as softplus, and import-hf writes the null that says so.
ModelConfig parse_model_config(const std::string& json_text, const std::string& name);

// The resolved configuration: every field, in the order of the table; parsing it gives an equal value.
std::string to_json(const RunConfig& config);
std::string to_json(const ModelConfig& config);

// As to_json, without a checkpoint.dir that is the default: what a run directory holds, so that a copy of it names its
// own checkpoints.
std::string to_portable_json(const RunConfig& config);

// 16 hex digits, a function of the resolved values alone (FNV-1a over to_json without white space).
std::string config_hash(const RunConfig& config);
std::string config_hash(const ModelConfig& config);

}  // namespace kestrel
