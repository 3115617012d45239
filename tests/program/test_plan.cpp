// kestrel plan: the sizes of the shipped configurations, without allocating them.
#include "program.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

const std::string kConfigs = std::string(KESTREL_SOURCE_DIR) + "/configs/";

}  // namespace

TEST(Plan, PublishedModel) {
  const Outcome o = must(program({"plan", kConfigs + "k3_2p8t.json"}));
  EXPECT_NE(o.out.find("2.78 T total"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("104.2 B active"), std::string::npos) << o.out;
  // Its weights alone are 11 TB: planning must not touch them.  The limits are those of the issue.
  EXPECT_LT(o.seconds, 5);
  EXPECT_LT(o.peak_bytes, int64_t{300} << 20);
}

TEST(Plan, BenchmarkModel) {
  const Outcome text = must(program({"plan", kConfigs + "bench_2p8b.json"}));
  EXPECT_NE(text.out.find("2.826 B total"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("5.19 G "), std::string::npos) << text.out;
  const json j = json::parse(must(program({"plan", kConfigs + "bench_2p8b.json", "--json"})).out);
  // design: 2.826 B, 0.821 B of them active, 5.19 GFLOP a token; to the digits given
  EXPECT_NEAR(j["parameters"]["total"].get<double>(), 2.826e9, 0.5e6);
  EXPECT_NEAR(j["parameters"]["active"].get<double>(), 0.821e9, 0.5e6);
  EXPECT_NEAR(j["flops_per_token"]["total"].get<double>(), 5.19e9, 0.005e9);
  EXPECT_EQ(j["tokens_per_step"], 524288);
}

TEST(Plan, EveryShippedConfiguration) {
  for (const auto& e : std::filesystem::recursive_directory_iterator(kConfigs)) {
    if (!e.is_regular_file()) continue;
    const Outcome o = must(program({"plan", e.path().string(), "--json"}));
    const json j = json::parse(o.out);
    EXPECT_GT(j["parameters"]["total"].get<int64_t>(), j["parameters"]["routed_experts"].get<int64_t>()) << e.path();
    int64_t sum = 0;
    for (const auto& [purpose, bytes] : j["bytes"].items()) sum += bytes.get<int64_t>();
    EXPECT_EQ(j["total_bytes"], sum) << e.path();
  }
}

// Each of these once left 64 bits on its way through the plan.
TEST(Plan, SizesBeyondCountingAreRefused) {
  const auto plan = [](const Arguments& overrides) {
    Arguments a = {"plan", kConfigs + "quickstart.json"};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return program(a);
  };
  expect_refusal(plan({"train.global_batch_size=2147483647", "train.micro_batch_size=2147483647",
                       "data.sequence_length=2147483647"}),
                 2, {"train.global_batch_size is 2147483647", "limit is 2147483647"});
  expect_refusal(plan({"model.vocab_size=2147483647"}), 2, {"model.vocab_size is 2147483647", "16777216"});
  expect_refusal(plan({"model.num_experts=16384", "model.hidden_size=1048576", "model.moe_intermediate_size=1048576",
                       "model.routed_expert_hidden_size=1048576"}),
                 2, {"too large", "w1.weight", "2^55 parameters", "model.num_experts"});
  // The longest row under the most heads: 2^59 bytes for one projection, and there are several.
  expect_refusal(plan({"model.num_experts=0", "model.num_hidden_layers=2", "model.linear_attn_config.num_heads=65536",
                       "model.linear_attn_config.head_dim=1024", "data.sequence_length=2147483647",
                       "train.global_batch_size=1", "train.micro_batch_size=1"}),
                 4, {"2^60 bytes", "train.micro_batch_size"});
  const Outcome largest = must(plan({"model.vocab_size=16777216", "model.hidden_size=1048576"}));
  EXPECT_NE(largest.out.find("total"), std::string::npos);
}

TEST(Plan, CountsWhatTrainingAllocates) {
  const TempDir dir;
  write_tokens(dir / "train.safetensors", 2000);
  write_text(dir / "run.json", tiny_run(dir / "train.safetensors", dir / "run").dump());
  const json plan = json::parse(must(program({"plan", dir / "run.json", "--json"})).out);
  must(program({"train", dir / "run.json"}));
  const std::string checkpoint = dir / "run/checkpoints/step_00000006";
  int64_t elements = 0;
  for (const auto& [name, file] : files_of(checkpoint)) {
    if (!name.ends_with(".safetensors")) continue;
    const SafetensorsFile shard(checkpoint + "/" + name);
    for (const auto& [tensor, entry] : shard.entries()) {
      const bool bias = tensor.ends_with("e_score_correction_bias");
      if (!tensor.starts_with("optimizer.") && !bias) elements += entry.bytes / 4;
    }
  }
  EXPECT_EQ(plan["parameters"]["total"], elements);
}

// Every site of the residual mixes all rows before it; none may hold a list of its own.
TEST(Plan, MemoryGrowsWithTheDepthNotItsSquare) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer keeps freed memory";
#endif
  const TempDir dir;
  json run = tiny_run("none", dir / "run");
  write_text(dir / "run.json", run.dump());
  const Outcome shallow =
      must(program({"plan", dir / "run.json"}));  // the program's own memory; a CUDA build's is 210 MiB
  const Outcome o = must(program({"plan", dir / "run.json", "model.num_hidden_layers=4000"}));
  EXPECT_LT(o.peak_bytes - shallow.peak_bytes, int64_t{150} << 20);  // about 90 MiB; with lists 600
  EXPECT_LT(o.seconds, 10);                                          // 0.4 on a free machine
}
