// Every file of configs/ablations trains, resumes and generates.
#include <algorithm>

#include "program.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

const std::string kAblations = std::string(KESTREL_SOURCE_DIR) + "/configs/ablations";

std::vector<std::string> ablations() {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(kAblations)) names.push_back(e.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

// "model.balancing.gain" -> value, of a run file's lines.
void flatten(const json& tree, const std::string& prefix, std::map<std::string, json>& out) {
  for (const auto& [key, value] : tree.items()) {
    if (value.is_object()) {
      flatten(value, prefix + key + ".", out);
    } else {
      out[prefix + key] = value;
    }
  }
}

// Sizes that make a file of configs/ablations a matter of a second.
const std::map<std::string, json> kTiny = {{"model.vocab_size", 300},
                                           {"model.hidden_size", 32},
                                           {"model.linear_attn_config.num_heads", 2},
                                           {"model.linear_attn_config.head_dim", 16},
                                           {"model.num_attention_heads", 2},
                                           {"model.q_lora_rank", 12},
                                           {"model.kv_lora_rank", 16},
                                           {"model.qk_nope_head_dim", 8},
                                           {"model.qk_rope_head_dim", 4},
                                           {"model.v_head_dim", 8},
                                           {"model.intermediate_size", 48},
                                           {"model.moe_intermediate_size", 16},
                                           {"model.routed_expert_hidden_size", 24},
                                           {"data.sequence_length", 32},
                                           {"train.steps", 30},
                                           {"train.global_batch_size", 4},
                                           {"train.micro_batch_size", 2},
                                           {"eval.every", 15},
                                           {"eval.batches", 2},
                                           {"checkpoint.every", 15},
                                           {"checkpoint.keep", 0}};

// Those of them that the file itself does not set: what it ablates stays as written.
Arguments overrides_for(const std::string& file, const std::string& data) {
  std::map<std::string, json> own, tiny = kTiny;
  flatten(json::parse(read_text(file), nullptr, true, /*ignore_comments=*/true), "", own);
  tiny["data.train"] = {data + "/data/train-*.safetensors"};
  tiny["data.validation"] = {data + "/data/validation-*.safetensors"};
  tiny["data.tokenizer"] = data + "/tokenizer.json";
  // A decay must fit into the run.
  if (own.count("schedule.decay_steps")) {
    own.erase("schedule.decay_steps");
    tiny["schedule.decay_steps"] = 10;
  }
  Arguments out;
  for (const auto& [path, value] : tiny) {
    if (!own.count(path)) out.push_back(path + "=" + value.dump());
  }
  return out;
}

class Ablation : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(Ablation, TrainsResumesAndGenerates) {
  const TempDir dir;
  make_text_data(dir.path());
  const std::string file = kAblations + "/" + GetParam() + ".json";
  Arguments command = {"train", file};
  const Arguments tiny = overrides_for(file, dir.path());
  command.insert(command.end(), tiny.begin(), tiny.end());

  CommandOptions first, second;
  first.folder = dir / "first";
  second.folder = dir / "second";
  const std::string run = "/runs/" + GetParam(), half = run + "/checkpoints/step_00000015",
                    full = run + "/checkpoints/step_00000030";
  std::filesystem::create_directories(first.folder);
  std::filesystem::create_directories(second.folder + run + "/checkpoints");
  must(program(command, first));
  const std::vector<json> metrics = metrics_of(first.folder + run);
  double early = 0, late = 0;
  int64_t steps = 0;
  for (const json& line : metrics) {
    if (!line.contains("loss")) continue;
    ++steps;
    ASSERT_TRUE(line["loss"].is_number()) << line;
    EXPECT_FALSE(line["skipped"].get<bool>()) << line;
    if (steps <= 5) early += line["loss"].get<double>() / 5;
    if (steps > 25) late += line["loss"].get<double>() / 5;
  }
  EXPECT_EQ(steps, 30);
  EXPECT_LT(late, early - 0.1);  // thirty steps on 300 ids leave the uniform 5.7 nats by far more than this

  // From the checkpoint at half time, in another folder: the same end, bit for bit.
  std::filesystem::copy(first.folder + half, second.folder + half);
  const Outcome resumed = must(program(command, second));
  EXPECT_NE(resumed.all().find("resuming from"), std::string::npos) << resumed.all();
  EXPECT_GT(expect_same_tensors(first.folder + full, second.folder + full), 50u);
  std::vector<json> tail;
  for (const json& line : metrics) {
    if (line["step"] > 15) tail.push_back(line);
  }
  EXPECT_EQ(metrics_of(second.folder + run), tail);

  const Outcome generated = must(program({"generate", first.folder + full, "--prompt", "And God said", "--max-tokens",
                                          "12", "--temperature", "0.8", "--ignore-eos"},
                                         first));
  EXPECT_TRUE(generated.out.starts_with("And God said")) << generated.out;
  EXPECT_GT(generated.out.size(), std::string("And God said").size() + 4) << generated.out;
  EXPECT_NE(generated.err.find("12 tokens in"), std::string::npos) << generated.err;
}

INSTANTIATE_TEST_SUITE_P(Files, Ablation, ::testing::ValuesIn(ablations()), [](const auto& p) { return p.param; });

TEST(Ablations, AreAllHere) {
  EXPECT_GE(ablations().size(), 41u);
}
