// A run file small enough to read, and the message of the error that a change to it causes.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/core/error.h"
#include "src/config/run_config.h"

namespace kestrel::test {

// Line numbers matter to the tests: "hidden_size" stands in line 4.
inline const std::string kSmall = R"({
  "model": {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "linear_attn_config": { "full_attn_every": 4, "num_heads": 2, "head_dim": 8 },
    "num_attention_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8
  },
  "data": { "sequence_length": 32 },
  "train": { "steps": 100, "global_batch_size": 8, "micro_batch_size": 2 },
  "schedule": { "peak_lr": 1e-3, "warmup_steps": 10 }
}
)";

inline RunConfig small(const std::vector<std::string>& overrides = {}) {
  return parse_run_config(kSmall, "small.json", overrides);
}

inline std::string replaced(std::string all, const std::string& from, const std::string& to) {
  const size_t at = all.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? all : all.replace(at, from.size(), to);
}

// The message of the ConfigError that `action` throws; "" and a failure when it throws none.
template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.code(), ExitCode::usage);
    return e.what();
  }
  ADD_FAILURE() << "no ConfigError";
  return "";
}

inline std::string refusal(const std::string& json_text) {
  return message_of([&] { parse_run_config(json_text, "small.json"); });
}
inline std::string refusal_of_overrides(const std::vector<std::string>& overrides) {
  return message_of([&] { small(overrides); });
}

// Every part stands in the message, which is one paragraph ending in a full stop.
inline void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "missing: " << part << "\nin: " << message;
  }
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_TRUE(!message.empty() && message.back() == '.') << message;
}

}  // namespace kestrel::test
