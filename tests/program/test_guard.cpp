// Steps that must not count, and heads that must be clipped.
#include "program.h"
#include "src/checkpoint/checkpoint.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

class Guard : public ::testing::Test {
 protected:
  Guard() { write_tokens(dir_ / "train.safetensors", 3000); }
  json run(const std::string& name) const { return tiny_run(dir_ / "train.safetensors", dir_ / name); }
  Outcome train(const json& j, const Arguments& overrides = {}) const {
    write_text(dir_ / "run.json", j.dump());
    Arguments a = {"train", dir_ / "run.json"};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return program(a);
  }
  // Weights of a few steps of `first`, with all of one tensor set to a value, in a directory `weights`; the file.
  std::string weights(const json& first, const std::string& tensor, float value) const {
    must(train(first, {"train.steps=3", "schedule.warmup_steps=1"}));
    must(program({"export-hf", dir_ / "first", "--out", dir_ / "weights"}));
    const std::string file = dir_ / "weights/model.safetensors";
    std::string bytes = read_text(file);
    {
      const SafetensorsFile all(file);
      int64_t data = 0;  // bytes behind the header
      const char* start = static_cast<const char*>(all.entries().begin()->second.data);
      for (const auto& [name, e] : all.entries()) {
        data += e.bytes;
        start = std::min(start, static_cast<const char*>(e.data));
      }
      const auto& e = all.entry(tensor);
      const size_t at = bytes.size() - static_cast<size_t>(data - (static_cast<const char*>(e.data) - start));
      for (size_t i = 0; i < static_cast<size_t>(e.bytes); i += 4) std::memcpy(bytes.data() + at + i, &value, 4);
    }
    write_text(file, bytes);
    return file;
  }

  static constexpr float kHuge = 3e38f;  // finite, but no product with it is
  TempDir dir_;
};

}  // namespace

TEST_F(Guard, NonFiniteStepsAreRecordedNotAppliedAndStopTheRun) {
  const std::string file = weights(run("first"), "model.norm.weight", kHuge);
  json second = run("second");
  second["train"]["init_from"] = dir_ / "weights";
  second["checkpoint"]["every"] = 2;
  const Outcome o = train(second);
  EXPECT_EQ(o.code, 5) << o.all();
  for (const char* piece : {"not finite in 3 steps in a row", "step 3", "peak_lr"})
    EXPECT_NE(o.err.find(piece), std::string::npos) << o.all();
  const std::vector<json> metrics = metrics_of(dir_ / "second");
  ASSERT_EQ(metrics.size(), 3u);
  for (const json& line : metrics) {
    EXPECT_TRUE(line["skipped"].get<bool>()) << line;
    EXPECT_TRUE(line.contains("nonfinite")) << line;
  }
  // The checkpoint of step 2 holds the weights the run started from: no update was applied.
  const LoadedCheckpoint c = open_checkpoint(dir_ / "second/checkpoints/step_00000002");
  const SafetensorsFile weights(file);
  for (const auto& [name, entry] : weights.entries()) {
    EXPECT_EQ(std::memcmp(c.tensor(name).data, entry.data, static_cast<size_t>(entry.bytes)), 0) << name;
  }
}

TEST_F(Guard, WeightsThatAreNotFiniteAreRefusedWhereverTheyAreRead) {
  const std::string tensor = "model.layers.1.self_attn.o_proj.weight";
  weights(run("first"), tensor, std::nanf(""));
  const std::string model = dir_ / "weights", shard = dir_ / "train.safetensors";
  expect_refusal(program({"import-hf", model, "--out", dir_ / "imported"}), 3, {model, tensor, "nan"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "imported"));
  expect_refusal(program({"eval", model, "--data", shard, "--sequence-length", "24"}), 3, {model, tensor, "nan"});
  expect_refusal(program({"generate", model, "--prompt", "x"}), 3, {model, tensor, "nan"});
  std::vector<int32_t> ids(24, 1);
  write_safetensors(dir_ / "tokens.safetensors",
                    {{"tokens", Tensor::of(ids.data(), {1, 24})}, {"targets", Tensor::of(ids.data(), {1, 24})}});
  expect_refusal(
      program({"parity", "--model", model, "--tokens", dir_ / "tokens.safetensors", "--out", dir_ / "out.safetensors"}),
      3, {model, tensor, "nan"});
  json second = run("second");
  second["train"]["init_from"] = model;
  expect_refusal(train(second), 3, {model, tensor, "nan"});
  expect_refusal(train(second, {"--dry-run"}), 3, {model, tensor, "nan"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "second"));

  // A checkpoint whose checksums are right, of weights that are not.
  const LoadedCheckpoint good = open_checkpoint(dir_ / "first/checkpoints/step_00000003");
  std::vector<NamedTensor> tensors;
  std::vector<float> bad;
  for (const std::string& name : good.names()) {
    Tensor t = good.tensor(name);
    if (name == tensor) {
      bad.assign(t.f32(), t.f32() + t.numel());
      bad.back() = HUGE_VALF;
      t.data = bad.data();
    }
    tensors.push_back({name, t, good.shape(name)});
  }
  save_checkpoint(dir_ / "first/checkpoints", 4, tensors, good.train_state_json, {});
  expect_refusal(program({"eval", dir_ / "first", "--data", shard}), 3, {"step_00000004", tensor, "inf", "511 of 512"});
  expect_refusal(train(run("first")), 3, {"step_00000004", tensor, "inf"});
}

TEST_F(Guard, ResultsThatAreNotFiniteAreNoSuccess) {
  make_text_data(dir_.path());
  json text = run("first");
  text["model"]["vocab_size"] = 300;
  text["data"]["train"] = {dir_ / "data/train-*.safetensors"};
  text["data"]["tokenizer"] = dir_ / "tokenizer.json";
  weights(text, "model.norm.weight", kHuge);
  const std::string model = dir_ / "weights";
  write_text(dir_ / "choices.jsonl", R"({"context": "a", "choices": [" b", " c"], "answer": 0})");
  const Outcome loss =
      program({"eval", model, "--data", dir_ / "data/validation-*.safetensors", "--sequence-length", "24", "--json"});
  const Outcome choices = program({"eval", model, "--choices", dir_ / "choices.jsonl", "--sequence-length", "24"});
  const Outcome written = program({"generate", model, "--prompt", "In the", "--temperature", "0"});
  expect_refusal(loss, 5, {model, "the loss", "earlier checkpoint"});
  expect_refusal(choices, 5, {"\" b\"", "earlier checkpoint"});
  expect_refusal(written, 5, {"logits", "earlier checkpoint"});
  EXPECT_EQ(loss.out + choices.out, "");
}

TEST_F(Guard, QkClipHoldsTheLogitsDown) {
  json free = run("free"), clipped = run("clipped");
  clipped["optimizer"]["qk_clip"] = 1e-3;
  must(train(free));
  must(train(clipped));
  int64_t heads = 0;
  for (const json& line : metrics_of(dir_ / "clipped")) heads += line["clipped_heads"].get<int64_t>();
  EXPECT_GT(heads, 0);
  for (const json& line : metrics_of(dir_ / "free")) EXPECT_FALSE(line.contains("clipped_heads"));
  const auto norm = [&](const std::string& name) {  // of the queries' and keys' expansion
    const LoadedCheckpoint c = open_checkpoint(dir_ / name + "/checkpoints/step_00000006");
    const Tensor w = c.tensor("model.layers.1.self_attn.q_b_proj.weight");
    double sum = 0;
    for (int64_t i = 0; i < w.numel(); ++i) sum += static_cast<double>(w.f32()[i]) * static_cast<double>(w.f32()[i]);
    return std::sqrt(sum);
  };
  EXPECT_LT(norm("clipped"), 0.7 * norm("free"));  // scaled down step by step
}
