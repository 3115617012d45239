// The run directory and the checkpoint directory: whose they are, what survives in them, what is tried before a run.
#include <csignal>
#include <thread>

#include "program.h"
#include "src/checkpoint/checkpoint.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

class RunDirectory : public ::testing::Test {
 protected:
  RunDirectory() { write_tokens(shard_, 2000); }

  Outcome train(const Arguments& overrides, const CommandOptions& options = {}) const {
    return program(arguments(overrides), options);
  }
  Arguments arguments(const Arguments& overrides) const {
    write_text(file_, tiny_run(shard_, dir_ / "a").dump());
    Arguments a = {"train", file_};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return a;
  }
  // The checkpoint that a command which only reads takes for `run`.
  std::string used_by(const std::string& run, const CommandOptions& options = {}) const {
    return json::parse(must(program({"eval", run, "--data", shard_, "--json"}, options)).out)["model"];
  }
  static std::string step(const std::string& run, int n) {
    return run + "/checkpoints/step_0000000" + std::to_string(n);
  }

  TempDir dir_;
  std::string shard_ = dir_ / "train.safetensors", file_ = dir_ / "run.json";
  std::string a_ = dir_ / "a", b_ = dir_ / "b", c_ = dir_ / "c";
};

}  // namespace

TEST_F(RunDirectory, CopiedItUsesItsOwnCheckpoints) {
  must(train({}));
  fs::copy(a_, b_, fs::copy_options::recursive);
  must(train({"train.steps=8"}));
  EXPECT_EQ(used_by(a_), step(a_, 8));
  EXPECT_EQ(used_by(b_), step(b_, 6));
  // Its config.json as a run file of its own: nothing of the original is read or written.
  const auto before = files_of(a_);
  const Outcome o = must(program({"train", b_ + "/config.json", "log.dir=" + b_, "train.steps=8"}));
  EXPECT_NE(o.out.find("resuming from " + step(b_, 6)), std::string::npos) << o.all();
  EXPECT_EQ(files_of(a_), before);
  EXPECT_GT(expect_same_tensors(step(a_, 8), step(b_, 8)), 100u);
}

TEST_F(RunDirectory, MovedItIsReadAndGoesOn) {
  CommandOptions inside;
  inside.folder = dir_.path();
  must(train({"log.dir=a"}, inside));  // a relative path in its config.json
  EXPECT_EQ(used_by(a_), step(a_, 6));
  fs::rename(a_, c_);
  EXPECT_EQ(used_by(c_), step(c_, 6));
  EXPECT_EQ(used_by("c", inside), step("c", 6));
  must(program({"export-hf", c_, "--out", dir_ / "weights"}));
  const Outcome o = must(train({"log.dir=" + c_, "train.steps=8"}));
  EXPECT_NE(o.out.find("resuming from " + step(c_, 6)), std::string::npos) << o.all();
  EXPECT_EQ(metrics_of(c_).size(), 8u);
}

TEST_F(RunDirectory, CheckpointsInsideUnderAnotherNameMoveToo) {
  must(train({"checkpoint.dir=" + (a_ + "/kept")}));
  fs::rename(a_, b_);
  EXPECT_EQ(used_by(b_), b_ + "/kept/step_00000006");
}

TEST_F(RunDirectory, CheckpointsElsewhereStayThere) {
  const std::string elsewhere = dir_ / "elsewhere";
  must(train({"checkpoint.dir=" + elsewhere}));
  fs::rename(a_, b_);
  EXPECT_EQ(used_by(b_), elsewhere + "/step_00000006");
}

TEST_F(RunDirectory, ASecondTrainerIsRefusedAndReadersAreNot) {
  Arguments argv = {kProgram};
  for (const std::string& a : arguments({"train.steps=1000000", "checkpoint.every=5"})) argv.push_back(a);
  Process first(argv);
  while (first.running() && !fs::exists(a_ + "/checkpoints/latest"))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::string holder = read_text(a_ + "/.lock");
  ASSERT_EQ(holder.find("process "), 0u);
  const std::string name = holder.substr(0, holder.size() - 1);
  expect_refusal(train({}), 3, {a_, "in use", name, "log.dir"});
  expect_refusal(train({"--dry-run"}), 3, {a_, "in use", name});
  expect_refusal(train({"log.dir=" + b_, "checkpoint.dir=" + a_ + "/checkpoints"}), 3,
                 {a_ + "/checkpoints", "in use", name, "checkpoint.dir"});
  EXPECT_FALSE(fs::exists(b_));
  must(program({"eval", a_, "--data", shard_}));
  ASSERT_TRUE(first.running());

  // Killed, it leaves the file and not the lock.
  first.send(SIGKILL);
  first.wait();
  ASSERT_TRUE(fs::exists(a_ + "/.lock"));
  const Outcome o = must(train({"train.steps=1000000", "--dry-run"}));
  EXPECT_FALSE(fs::exists(a_ + "/.lock"));
}

TEST_F(RunDirectory, OneFolderForBothIsClaimedOnce) {
  must(train({"checkpoint.dir=" + a_}));
  EXPECT_EQ(used_by(a_), a_ + "/step_00000006");
}

TEST_F(RunDirectory, StartingOverKeepsTheMetrics) {
  must(train({}));
  const std::string first = read_text(a_ + "/metrics.jsonl");
  const Outcome again = must(train({"checkpoint.resume=never"}));
  EXPECT_NE(again.out.find("kept as " + a_ + "/metrics.1.jsonl"), std::string::npos) << again.all();
  EXPECT_NE(again.out.find("checkpoints of an earlier run"), std::string::npos) << again.all();
  EXPECT_EQ(read_text(a_ + "/metrics.1.jsonl"), first);
  const std::string second = read_text(a_ + "/metrics.jsonl");
  const Outcome elsewhere = must(train({"checkpoint.dir=" + b_}));
  EXPECT_NE(elsewhere.out.find("metrics.2.jsonl"), std::string::npos) << elsewhere.all();
  EXPECT_EQ(read_text(a_ + "/metrics.2.jsonl"), second);
  EXPECT_EQ(read_text(a_ + "/metrics.1.jsonl"), first);
  EXPECT_EQ(metrics_of(a_).size(), 6u);
}

TEST_F(RunDirectory, DryRunTriesThemAndLeavesNoTrace) {
  const std::string deep = dir_ / "new/folders/run";
  must(train({"--dry-run", "log.dir=" + deep, "checkpoint.dir=" + (dir_ / "other/checkpoints")}));
  EXPECT_FALSE(fs::exists(dir_ / "new"));
  EXPECT_FALSE(fs::exists(dir_ / "other"));

  write_text(dir_ / "file", "a regular file\n");
  for (const std::string& checkpoints : {dir_ / "file", dir_ / "file/checkpoints"}) {
    expect_refusal(train({"--dry-run", "checkpoint.dir=" + checkpoints}), 3, {checkpoints, "checkpoint.dir"});
    expect_refusal(train({"checkpoint.dir=" + checkpoints}), 3, {checkpoints, "checkpoint.dir"});  // before any step
    EXPECT_FALSE(fs::exists(a_));
  }
  EXPECT_EQ(read_text(dir_ / "file"), "a regular file\n");
  const std::string unwritable = dir_ / "unwritable";
  fs::create_directory(unwritable);
  fs::permissions(unwritable, fs::perms::owner_read | fs::perms::owner_exec);
  const bool forbidden = !std::ofstream(unwritable + "/probe");  // root may write anywhere
  if (forbidden) expect_refusal(train({"--dry-run", "checkpoint.dir=" + unwritable}), 3, {unwritable, "denied"});
  fs::permissions(unwritable, fs::perms::owner_all);
}

TEST_F(RunDirectory, DryRunReadsWhatARunWouldStartFrom) {
  must(train({}));
  const auto before = files_of(a_);
  must(train({"--dry-run", "train.steps=8"}));
  expect_refusal(train({"--dry-run", "train.steps=8", "data.seed=1"}), 3, {"data.seed"});
  expect_refusal(train({"--dry-run", "checkpoint.resume=never", "train.init_from=" + (dir_ / "nowhere")}), 3,
                 {"nowhere"});
  EXPECT_EQ(files_of(a_), before);
}

TEST_F(RunDirectory, MoreThanTheMachinesMemoryIsRefusedWithoutTakingIt) {
  const int64_t own = must(train({"--dry-run"})).peak_bytes;
  for (const char* huge : {"model.hidden_size=1048576", "model.hidden_size=65536"}) {
    const Outcome o = train({"--dry-run", huge, "model.vocab_size=16777216"});
    expect_refusal(o, 4,
                   {"GiB", "model.hidden_size", "model.num_hidden_layers", "model.vocab_size", "train.micro_batch_size",
                    "data.sequence_length"});
    EXPECT_LT(o.peak_bytes - own, int64_t{50} << 20);  // the logits of one token alone would be 64 MiB
  }
  EXPECT_FALSE(fs::exists(a_));
}

TEST_F(RunDirectory, FullDiskStopsTheRunAtTheFirstFile) {
  CommandOptions full;
  full.file_limit = 8 * 1024;  // config.json and the log fit, 100 lines of metrics do not
  expect_refusal(train({"train.steps=100"}, full), 3, {a_ + "/metrics.jsonl", "File too large", "log.dir"});
  write_text(a_ + "/log.txt", std::string(static_cast<size_t>(full.file_limit), '\n'));
  expect_refusal(train({}, full), 3, {a_ + "/log.txt", "File too large", "log.dir"});
  full.file_limit = 1024;
  expect_refusal(train({"log.dir=" + b_}, full), 3, {b_, "File too large"});
}
