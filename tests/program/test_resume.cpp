// Stopping and going on: a run in pieces is bit for bit the run in one piece; thread counts change no bit.
#include <csignal>
#include <thread>

#include "kernels/gemm/gemm.h"
#include "program.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

constexpr int kPreempted = 75;

// 40 steps of eight micro-batches, long enough (about a second) to be hit by a signal.
class Resume : public ::testing::Test {
 protected:
  Resume() {
    write_tokens(dir_ / "train.safetensors", 6000);
    write_tokens(dir_ / "validation.safetensors", 700, 64, 2);
    json run = tiny_run(dir_ / "train.safetensors", "run");  // relative: the same file serves several folders
    run["data"]["validation"] = {dir_ / "validation.safetensors"};
    run["train"]["steps"] = 40;
    run["train"]["global_batch_size"] = 16;
    run["eval"] = {{"every", 9}, {"batches", 0}};
    run["checkpoint"] = {{"every", 7}, {"keep", 2}};
    write_text(dir_ / "run.json", run.dump());
  }

  Arguments command(const Arguments& overrides = {}) const {
    Arguments a = {kProgram, "train", dir_ / "run.json"};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return a;
  }
  CommandOptions inside(const std::string& name) const {
    CommandOptions o;
    o.folder = dir_ / name;
    std::filesystem::create_directories(o.folder);
    return o;
  }
  void whole(const std::string& name, CommandOptions options, const Arguments& overrides = {}) const {
    options.folder = inside(name).folder;
    must(Process(command(overrides), options).wait());
  }
  // Signals the run once its metrics show `after` steps.  The step it stops at is its own affair.
  Outcome stopped(const std::string& name, int signal, int64_t after) const {
    Process p(command(), inside(name));
    while (p.running() && steps_logged(dir_ / name + "/run") < after) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    p.send(signal);
    return p.wait();
  }
  std::string end_of(const std::string& name) const { return dir_ / name + "/run/checkpoints/step_00000040"; }

  void expect_same_runs(const std::string& a, const std::string& b) const {
    EXPECT_GT(expect_same_tensors(end_of(a), end_of(b)), 100u);
    // Position, counters, data and configuration: the same text.
    EXPECT_EQ(read_text(end_of(a) + "/train_state.json"), read_text(end_of(b) + "/train_state.json"));
    EXPECT_EQ(metrics_of(dir_ / a + "/run"), metrics_of(dir_ / b + "/run"));
  }

  TempDir dir_;
};

}  // namespace

TEST_F(Resume, RunInThreePiecesEqualsTheRunInOne) {
  whole("one", {});
  const std::vector<json> reference = metrics_of(dir_ / "one/run");
  EXPECT_EQ(reference.size(), 40u + 5u);  // evaluations after 9, 18, 27, 36 and 40
  for (int64_t i = 0, seen = 0; const json& line : reference) {
    if (!line.contains("loss")) continue;
    EXPECT_EQ(line["step"], ++i);
    EXPECT_EQ(line["tokens"], seen += 16 * 24);
  }

  const Outcome first = stopped("pieces", SIGTERM, 5);
  ASSERT_EQ(first.code, kPreempted) << first.all();
  EXPECT_NE(first.all().find("stopped by signal 15"), std::string::npos) << first.all();
  EXPECT_NE(first.all().find("Start the same command again"), std::string::npos) << first.all();
  const int64_t after_first = steps_logged(dir_ / "pieces/run");
  EXPECT_GE(after_first, 5);
  EXPECT_LT(after_first, 40);

  const Outcome second = stopped("pieces", SIGUSR1, after_first + 5);
  ASSERT_EQ(second.code, kPreempted) << second.all();
  EXPECT_NE(second.all().find("resuming from"), std::string::npos) << second.all();
  EXPECT_NE(second.all().find("stopped by signal 10"), std::string::npos) << second.all();
  EXPECT_LT(steps_logged(dir_ / "pieces/run"), 40);

  const Outcome third = must(Process(command(), inside("pieces")).wait());
  EXPECT_NE(third.all().find("done: loss"), std::string::npos) << third.all();
  expect_same_runs("one", "pieces");
}

TEST_F(Resume, KilledWithoutWarningGoesOnFromTheLastCheckpoint) {
  whole("one", {});
  const Outcome killed = stopped("killed", SIGKILL, 17);  // at least two checkpoints lie behind it
  ASSERT_EQ(killed.code, 128 + SIGKILL);
  const Outcome rest = must(Process(command(), inside("killed")).wait());
  EXPECT_NE(rest.all().find("resuming from"), std::string::npos) << rest.all();
  expect_same_runs("one", "killed");
}

// Two threads wait without spinning: on a machine whose cores are taken, spinning would cost minutes.
TEST_F(Resume, ThreadCountChangesNoBitWithTheOwnProduct) {
  CommandOptions one, two;
  one.setting = {{"KESTREL_CPU_GEMM", "own"}, {"OMP_NUM_THREADS", "1"}};
  two.setting = {{"KESTREL_CPU_GEMM", "own"}, {"OMP_NUM_THREADS", "2"}, {"OMP_WAIT_POLICY", "passive"}};
  whole("one", one);
  whole("two", two);
  EXPECT_NE(read_text(dir_ / "one/run/log.txt").find("own"), std::string::npos);
  expect_same_runs("one", "two");
}

TEST_F(Resume, ThreadCountChangesNoLossWithOpenBlas) {
  if (!has_openblas()) {
    CommandOptions o;
    o.setting = {{"KESTREL_CPU_GEMM", "openblas"}};
    expect_refusal(program({"doctor"}, o), 2, {"KESTREL_CPU_GEMM", "openblas", "own"});
    return;
  }
  CommandOptions one, two;
  one.setting = {{"KESTREL_CPU_GEMM", "openblas"}, {"OMP_NUM_THREADS", "1"}};
  two.setting = {{"KESTREL_CPU_GEMM", "openblas"}, {"OMP_NUM_THREADS", "2"}, {"OMP_WAIT_POLICY", "passive"}};
  whole("one", one);
  whole("two", two);
  EXPECT_NE(read_text(dir_ / "one/run/log.txt").find("OpenBLAS"), std::string::npos);
  const auto a = metrics_of(dir_ / "one/run"), b = metrics_of(dir_ / "two/run");
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const char* name = a[i].contains("loss") ? "loss" : "val_loss";
    EXPECT_NEAR(a[i][name].get<double>() / b[i][name].get<double>(), 1.0, 1e-6) << a[i];  // the promise of the README
  }
}

TEST_F(Resume, MicroBatchSizeIsNotPartOfTheRun) {
  // Rows per pass only regroup sums: the losses of a run in other micro-batches agree to fp32 rounding.
  whole("one", {}, {"train.steps=6", "schedule.warmup_steps=2"});
  whole("large", {}, {"train.steps=6", "schedule.warmup_steps=2", "train.micro_batch_size=8"});
  const auto a = metrics_of(dir_ / "one/run"), b = metrics_of(dir_ / "large/run");
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].contains("loss")) continue;
    EXPECT_NEAR(a[i]["loss"].get<double>() / b[i]["loss"].get<double>(), 1.0, 1e-4) << a[i];
  }
}

TEST_F(Resume, CompleteRunSaysSoAndPastTheEndIsRefused) {
  whole("one", {}, {"train.steps=8"});
  const auto before = files_of(dir_ / "one/run/checkpoints");
  const Outcome again = must(Process(command({"train.steps=8"}), inside("one")).wait());
  EXPECT_NE(again.all().find("complete already"), std::string::npos) << again.all();
  EXPECT_NE(again.all().find("train.steps"), std::string::npos) << again.all();
  EXPECT_EQ(metrics_of(dir_ / "one/run").size(), 8u + 1u);  // nothing was lost: eval.every is 9, and the end evaluates

  expect_refusal(Process(command({"train.steps=5", "schedule.warmup_steps=1"}), inside("one")).wait(), 2,
                 {"step 8", "5 steps", "train.steps", "checkpoint.resume=never"});
  EXPECT_EQ(files_of(dir_ / "one/run/checkpoints"), before);
  EXPECT_EQ(metrics_of(dir_ / "one/run").size(), 8u + 1u);
}

TEST_F(Resume, WhatChangedInTheRunFileIsSaid) {
  whole("one", {}, {"train.steps=8"});
  const Outcome same = must(Process(command({"train.steps=8"}), inside("one")).wait());
  EXPECT_EQ(same.out.find("changed since"), std::string::npos) << same.all();
  const Outcome other =
      must(Process(command({"train.steps=9", "train.seed=17", "schedule.peak_lr=0.01"}), inside("one")).wait());
  for (const char* line : {"train.seed: 0 -> 17\n", "schedule.peak_lr: 0.005 -> 0.01\n", "train.steps: 8 -> 9\n"})
    EXPECT_NE(other.out.find(std::string("changed since it was saved: ") + line), std::string::npos) << other.all();
}

TEST_F(Resume, MoreStepsGoOnFromACompleteRun) {
  whole("one", {}, {"train.steps=8", "schedule.kind=constant"});
  const Outcome more = must(Process(command({"train.steps=12", "schedule.kind=constant"}), inside("one")).wait());
  EXPECT_NE(more.all().find("resuming from"), std::string::npos) << more.all();
  whole("two", {}, {"train.steps=12", "schedule.kind=constant"});
  expect_same_tensors(dir_ / "one/run/checkpoints/step_00000012", dir_ / "two/run/checkpoints/step_00000012");
}
