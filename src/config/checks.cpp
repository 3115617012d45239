#include "src/config/checks.h"

#include <algorithm>
#include <filesystem>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

const std::string kLayers = "model.linear_attn_config.full_attn_layers";
const std::string kKdaLayers = "model.linear_attn_config.kda_layers";
const std::string kEvery = "model.linear_attn_config.full_attn_every";

std::string list_text(const std::vector<int64_t>& v) {
  return nlohmann::json(v).dump();
}

void check_required(const Draft& d) {
  for (const Field& f : fields()) {
    const bool of_model = f.path.rfind("model.", 0) == 0;
    if (!f.is_required || d.given(f.path) || (d.model_section_alone && !of_model)) continue;
    const std::string where =
        d.model_section_alone && f.section() == "model" ? "the file" : "section \"" + d.shown(f.section()) + "\"";
    d.refuse(f.path,
             text("is missing: ", f.meaning, " Add it to ", where, ", for example \"", f.leaf(), "\": ", f.example));
  }
}

// ---- layer lists

void check_list(const Draft& d, const std::string& path, const std::vector<int64_t>& layers) {
  const int64_t count = d.config.model.num_hidden_layers;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] > count) {
      d.refuse(path, text("names layer ", layers[i], ", but model.num_hidden_layers is ", count,
                          ": layers count from 1 to ", count, ". Remove it, or set num_hidden_layers"));
    }
    if (i > 0 && layers[i] <= layers[i - 1]) {
      d.refuse(path, text("has ", layers[i], " after ", layers[i - 1], ": the list must ascend and name a layer once"));
    }
  }
}

std::vector<int64_t> complement(int64_t count, const std::vector<int64_t>& layers) {
  std::vector<int64_t> rest;
  size_t next = 0;
  for (int64_t l = 1; l <= count; ++l) {
    if (next < layers.size() && layers[next] == l) {
      ++next;
    } else {
      rest.push_back(l);
    }
  }
  return rest;
}

std::vector<int64_t> every_nth(int64_t count, int64_t n) {
  std::vector<int64_t> layers;
  for (int64_t l = 1; l <= count; ++l) {
    if (l % n == 0 || l == count) layers.push_back(l);
  }
  return layers;
}

std::vector<int64_t> resolve_layers(const Draft& d) {
  const int64_t count = d.config.model.num_hidden_layers;
  if (d.full_attn_layers) check_list(d, kLayers, *d.full_attn_layers);
  if (d.kda_layers) check_list(d, kKdaLayers, *d.kda_layers);
  if (d.full_attn_every) {
    const std::vector<int64_t> layers = every_nth(count, *d.full_attn_every);
    const bool agrees = (!d.full_attn_layers || *d.full_attn_layers == layers) &&
                        (!d.kda_layers || *d.kda_layers == complement(count, layers));
    if (!agrees) {
      d.refuse(kEvery, text("is ", *d.full_attn_every, ", which makes full_attn_layers ", list_text(layers),
                            ", but a list says otherwise. Keep one of the two: set full_attn_every to null, or "
                            "full_attn_layers and kda_layers to null"));
    }
    return layers;
  }
  if (!d.full_attn_layers && !d.kda_layers) {
    d.refuse(kLayers, text("is missing, and neither kda_layers nor full_attn_every says which layers are MLA. K3 has "
                           "one in four and the last: \"full_attn_every\": 4"));
  }
  if (!d.kda_layers) return *d.full_attn_layers;
  const std::vector<int64_t> layers = complement(count, *d.kda_layers);
  if (d.full_attn_layers && *d.full_attn_layers != layers) {
    for (int64_t l = 1; l <= count; ++l) {
      const auto in = [l](const std::vector<int64_t>& v) { return std::find(v.begin(), v.end(), l) != v.end(); };
      const bool mla = in(*d.full_attn_layers), kda = in(*d.kda_layers);
      if (mla == kda) {
        d.refuse(kLayers, text("and kda_layers must share out the layers 1 to ", count, ", but layer ", l, " is in ",
                               mla ? "both" : "neither",
                               ". Correct one list, or set kda_layers to null to make "
                               "it the rest"));
      }
    }
  }
  return layers;
}

// ---- the model

// A size that only some models need: `why` says what needs it.
void need(const Draft& d, const std::string& path, int64_t value, const std::string& why) {
  if (value > 0) return;
  d.refuse(path, text(d.given(path) ? "is 0" : "is missing", ", but ", why, " need it: ", find_field(path)->meaning,
                      " Set it to at least 1"));
}

void check_attention(const Draft& d) {
  const ModelConfig& m = d.config.model;
  if (m.num_kda_layers() > 0) {
    const std::string why = text(m.num_kda_layers(), " of the layers are KDA and");
    need(d, "model.linear_attn_config.num_heads", m.linear_attn.num_heads, why);
    need(d, "model.linear_attn_config.head_dim", m.linear_attn.head_dim, why);
  }
  if (m.num_full_attention_layers() > 0) {
    const std::string why = text("the MLA layers ", list_text(m.full_attn_layers));
    need(d, "model.num_attention_heads", m.num_attention_heads, why);
    need(d, "model.kv_lora_rank", m.kv_lora_rank, why);
    need(d, "model.qk_nope_head_dim", m.qk_nope_head_dim, why);
    need(d, "model.qk_rope_head_dim", m.qk_rope_head_dim, why);
    need(d, "model.v_head_dim", m.v_head_dim, why);
  }
  if (d.num_key_value_heads && *d.num_key_value_heads != m.num_attention_heads) {
    d.refuse("model.num_key_value_heads",
             text("is ", *d.num_key_value_heads, ", but num_attention_heads is ", m.num_attention_heads,
                  ": in MLA every head has its own keys and values. Set them equal, or remove num_key_value_heads"));
  }
}

void check_experts(const Draft& d) {
  const ModelConfig& m = d.config.model;
  if (m.num_dense_layers() > 0) {
    need(d, "model.intermediate_size", m.intermediate_size, text(m.num_dense_layers(), " dense layers"));
  }
  if (m.num_experts == 0) return;
  if (m.num_moe_layers() == 0) {
    d.refuse("model.num_experts",
             text("is ", m.num_experts, ", but no layer has experts: first_k_dense_replace is ",
                  m.first_k_dense_replace, " and moe_layer_freq ", m.moe_layer_freq, " in a model of ",
                  m.num_hidden_layers, " layers. Lower one of them, or set num_experts to 0 for a dense model"));
  }
  const std::string why = text(m.num_moe_layers(), " layers of experts");
  need(d, "model.num_experts_per_token", m.num_experts_per_token, why);
  need(d, "model.moe_intermediate_size", m.moe_intermediate_size, why);
  if (m.num_experts_per_token >= m.num_experts) {
    d.refuse("model.num_experts_per_token",
             text("is ", m.num_experts_per_token, ", but there are ", m.num_experts,
                  " experts: a token must leave at least one out, or there is nothing to choose. ",
                  m.num_experts > 1 ? text("Set it to at most ", m.num_experts - 1, ", or raise num_experts")
                                    : text("Raise num_experts, or set it to 0 for a dense model")));
  }
  if (m.num_experts_per_token == 1 && m.moe_renormalize) {
    d.refuse("model.num_experts_per_token",
             "is 1 while moe_renormalize is true: the one weight is divided by itself, so the router has no gradient "
             "and cannot learn. Set moe_renormalize to false, or use at least 2 experts per token");
  }
  const BalancingConfig& b = m.balancing;
  if (b.method == BalancingConfig::Method::quantile_dynamic && b.estimator == BalancingConfig::Estimator::micro_mean) {
    d.refuse("model.balancing.estimator",
             "is \"micro_mean\", which only the method \"quantile\" has; \"quantile_dynamic\" takes \"histogram\" or "
             "\"exact\". Change one of the two");
  }
}

// ---- the run

void check_length(const Draft& d) {
  const TrainConfig& t = d.config.train;
  if (t.steps && t.tokens) {
    d.refuse("train.tokens", text("is ", *t.tokens, " while train.steps is ", *t.steps,
                                  ": only one of them can end the run. Remove one, or set it to null"));
  }
  if (!t.steps && !t.tokens) {
    d.refuse("train.steps",
             "is missing, and so is train.tokens: the run has no end. Set one of the two, for example "
             "\"steps\": 1000");
  }
  if (t.global_batch_size % t.micro_batch_size != 0) {
    d.refuse("train.micro_batch_size",
             text("is ", t.micro_batch_size, ", which does not divide train.global_batch_size = ", t.global_batch_size,
                  ". Choose a divisor, or a global batch of ",
                  (t.global_batch_size / t.micro_batch_size + 1) * t.micro_batch_size, " rows"));
  }
}

// Tokens, and the rows that a micro-batch makes for the experts, are numbered in 32 bits.
void check_batch(const Draft& d) {
  constexpr int64_t kMost = INT32_MAX;
  const ModelConfig& m = d.config.model;
  const int64_t G = d.config.train.global_batch_size, B = d.config.train.micro_batch_size;
  const int64_t T = d.config.data.sequence_length;
  const auto refuse = [&](const std::string& path, int64_t rows, int64_t most, const std::string& why) {
    d.refuse(path, text("is ", rows, ", times data.sequence_length = ", T, " that is ", rows * T, " tokens", why,
                        "; the limit is ", most, ". Lower one of the two"));
  };
  if (G * T > kMost) refuse("train.global_batch_size", G, kMost, " in a step");
  const bool dynamic = m.balancing.method == BalancingConfig::Method::quantile_dynamic;
  const int64_t slots = m.num_experts == 0 ? 1 : m.num_experts_per_token * (dynamic ? 2 : 1);
  if (B * T > kMost / slots) {
    refuse("train.micro_batch_size", B, kMost / slots,
           text(" in a micro-batch, ", slots, " rows for the experts each"));
  }
}

void check_schedule(const Draft& d) {
  const ScheduleConfig& s = d.config.schedule;
  const int64_t total = d.config.total_steps();
  if (s.min_lr > s.peak_lr) {
    d.refuse("schedule.min_lr", text("is ", s.min_lr, ", above schedule.peak_lr = ", s.peak_lr,
                                     ": the rate falls from peak to min. Lower min_lr or raise peak_lr"));
  }
  if (s.warmup_steps >= total) {
    d.refuse("schedule.warmup_steps",
             text("is ", s.warmup_steps, ", but the run has ", total, " step", total == 1 ? "" : "s",
                  ": the warm-up would not end. Set it to at most ", total - 1, ", or train longer"));
  }
  if (s.kind != ScheduleConfig::Kind::wsd) return;
  const int64_t room = total - 1 - s.warmup_steps;
  if (s.decay_steps < 1 || s.decay_steps > room) {
    d.refuse("schedule.decay_steps",
             text(d.given("schedule.decay_steps") ? text("is ", s.decay_steps) : "is missing", ", but \"wsd\" over ",
                  total, " steps with ", s.warmup_steps, " of warm-up ",
                  room < 1 ? text("leaves no step to decay in. Train for at least ", s.warmup_steps + 2,
                                  " steps, or lower schedule.warmup_steps")
                           : text("needs a decay of 1 to ", room, " steps. A tenth to a fifth of the run is usual")));
  }
}

// What depends on the number of ranks is the trainer's to check.
void check_parallel(const Draft& d) {
  const int64_t ranks = d.config.parallel.expert, experts = d.config.model.num_experts;
  if (ranks == 1) return;
  if (experts == 0) {
    d.refuse("parallel.expert", text("is ", ranks, ", but the model has no experts to share out. Set it to 1"));
  }
  if (experts % ranks != 0) {
    d.refuse("parallel.expert", text("is ", ranks, ", but model.num_experts ", experts,
                                     " cannot be shared out evenly. Set it to a divisor of num_experts"));
  }
}

void check_rest(const Draft& d) {
  const RunConfig& c = d.config;
  if (c.eval.every > 0 && c.data.validation.empty()) {
    d.refuse("eval.every", text("is ", c.eval.every,
                                ", but data.validation names no shards. Add some, or set "
                                "eval.every to 0"));
  }
  if (c.optimizer.qk_clip && c.model.num_full_attention_layers() == 0) {
    d.refuse("optimizer.qk_clip", text("is ", *c.optimizer.qk_clip,
                                       ", but the model has no MLA layer and KDA's "
                                       "queries and keys have unit length: there is nothing to clip. Set it to null"));
  }
}

void fill_directories(Draft& d) {
  LogConfig& log = d.config.log;
  if (log.dir.empty()) log.dir = "runs/" + std::filesystem::path(d.name).stem().string();
  if (d.config.checkpoint.dir.empty()) d.config.checkpoint.dir = default_checkpoint_dir(d.config);
}

}  // namespace

std::string default_checkpoint_dir(const RunConfig& config) {
  return config.log.dir + "/checkpoints";
}

void resolve_model(Draft& d) {
  check_required(d);
  ModelConfig& m = d.config.model;
  m.full_attn_layers = resolve_layers(d);
  constexpr double kDynamicEma = 0.9;  // a one-step threshold follows the noise of its batch
  if (m.balancing.method == BalancingConfig::Method::quantile_dynamic && !d.given("model.balancing.ema")) {
    m.balancing.ema = kDynamicEma;
  }
  check_attention(d);
  check_experts(d);
}

void resolve_run(Draft& d) {
  resolve_model(d);
  check_batch(d);
  check_length(d);
  check_batch(d);
  check_schedule(d);
  check_parallel(d);
  check_rest(d);
  fill_directories(d);
}

}  // namespace kestrel
