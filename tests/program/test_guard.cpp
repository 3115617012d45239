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
  TempDir dir_;
};

}  // namespace

TEST_F(Guard, NonFiniteStepsAreRecordedNotAppliedAndStopTheRun) {
  // Good weights of one step, then one of them made infinite.
  json first = run("first");
  must(train(first, {"train.steps=3", "schedule.warmup_steps=1"}));
  must(program({"export-hf", dir_ / "first", "--out", dir_ / "weights"}));
  const std::string file = dir_ / "weights/model.safetensors";
  std::string bytes = read_text(file);
  {
    const SafetensorsFile weights(file);
    const auto& e = weights.entry("model.layers.1.self_attn.o_proj.weight");
    const size_t header = bytes.size() - static_cast<size_t>([&] {
                            int64_t n = 0;
                            for (const auto& [name, entry] : weights.entries()) n += entry.bytes;
                            return n;
                          }());
    int64_t before = 0;
    const char* start = nullptr;
    for (const auto& [name, entry] : weights.entries()) {
      if (!start || static_cast<const char*>(entry.data) < start) start = static_cast<const char*>(entry.data);
    }
    before = static_cast<const char*>(e.data) - start;
    const float infinity = HUGE_VALF;
    std::memcpy(bytes.data() + header + before, &infinity, 4);
  }
  write_text(file, bytes);

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
