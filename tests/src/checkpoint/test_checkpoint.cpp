#include "src/checkpoint/checkpoint.h"

#include <omp.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "src/checkpoint/hash.h"
#include "tests/src/checkpoint/temp_dir.h"
#include "tests/support.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::flip_byte;
using test::slurp;
using test::spill;
using test::TempDir;

void expect_in(const std::string& part, const std::string& whole) {
  EXPECT_NE(whole.find(part), std::string::npos) << "\"" << part << "\" is not in: " << whole;
}

// A small state that differs from step to step.
struct State {
  test::Buffer w{3, 5}, m{7}, ids{4};
  explicit State(int64_t step) {
    w.normal(static_cast<uint64_t>(step) + 1);
    m.normal(static_cast<uint64_t>(step) + 1000);
    ids.normal(static_cast<uint64_t>(step) + 2000);
  }
  std::vector<NamedTensor> tensors() const { return {{"w", w, {}}, {"adam.m", m, {}}, {"ids", ids, {2, 2}}}; }
};

void save(const std::string& root, int64_t step, CheckpointPolicy policy = {.keep = 0}) {
  const State s(step);
  save_checkpoint(root, step, s.tensors(), text("{\"step\": ", step, "}"), policy);
}

void expect_state(const LoadedCheckpoint& c, int64_t step) {
  const State s(step);
  EXPECT_EQ(c.step, step);
  EXPECT_EQ(c.train_state_json, text("{\"step\": ", step, "}"));
  EXPECT_EQ(c.names(), (std::vector<std::string>{"adam.m", "ids", "w"}));
  EXPECT_EQ(std::memcmp(c.tensor("w").data, s.w->data, 60), 0);
  EXPECT_EQ(std::memcmp(c.tensor("adam.m").data, s.m->data, 28), 0);
  EXPECT_EQ(c.shape("ids"), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(c.tensor("ids").rank, 2);
}

std::vector<std::string> entries(const std::string& root) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(root)) out.push_back(e.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

int64_t found_step(const std::string& root, std::vector<RejectedCheckpoint>* rejected = nullptr) {
  const auto c = find_checkpoint(root, rejected);
  return c ? c->step : -1;
}

TEST(Checkpoint, SavedIsReadBackBitForBit) {
  TempDir dir;
  const std::string root = dir.path("run/checkpoints");  // made, parents too
  save(root, 100);
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "step_00000100"}));
  EXPECT_EQ(slurp(root + "/latest"), "step_00000100\n");
  EXPECT_EQ(entries(root + "/step_00000100"),
            (std::vector<std::string>{"manifest.json", "shard-00000-00000.safetensors", "train_state.json"}));
  std::vector<RejectedCheckpoint> rejected;
  const auto c = find_checkpoint(root, &rejected);
  ASSERT_TRUE(c);
  EXPECT_TRUE(rejected.empty());
  EXPECT_EQ(c->dir, root + "/step_00000100");
  expect_state(*c, 100);
  expect_in("Did you mean \"adam.m\"?", error_of<DataError>([&] { c->tensor("adam.n"); }));
  // Views outlive the object they came from as long as a copy lives.
  LoadedCheckpoint copy = open_checkpoint(root + "/step_00000100");
  const Tensor w = copy.tensor("w");
  {
    const LoadedCheckpoint other = std::move(copy);
    EXPECT_EQ(w.f32()[0], State(100).w[0]);
  }
  // The manifest is plain JSON with the checksums that xxhsum prints.
  const auto m = nlohmann::json::parse(slurp(root + "/step_00000100/manifest.json"));
  EXPECT_EQ(m["files"]["train_state.json"]["xxh64"], xxh64_hex("{\"step\": 100}"));
  EXPECT_EQ(m["tensors"]["w"]["parts"].size(), 1u);
}

TEST(Checkpoint, NothingThere) {
  TempDir dir;
  std::vector<RejectedCheckpoint> rejected;
  EXPECT_EQ(found_step(dir.path("none"), &rejected), -1);
  EXPECT_EQ(found_step(dir.path(), &rejected), -1);
  fs::create_directory(dir.path("step_final"));  // not a name of ours
  fs::create_directory(dir.path("step_7"));
  EXPECT_EQ(found_step(dir.path(), &rejected), -1);
  EXPECT_TRUE(rejected.empty());
  expect_in("no manifest.json", error_of<DataError>([&] { open_checkpoint(dir.path("none")); }));
}

TEST(Checkpoint, ShardsAreSplitAtTheLimitAndLargeTensorsByRows) {
  TempDir dir;
  // Rows of w are 20 bytes: at most two fit in a shard of 45, one in a shard of 20, none in one of 1 (one row each).
  for (int64_t limit : {45, 20, 1}) {
    const std::string root = dir.path(text("limit", limit));
    save(root, 1, {.keep = 0, .shard_bytes = limit});
    const auto c = find_checkpoint(root, nullptr);
    ASSERT_TRUE(c);
    expect_state(*c, 1);
    const auto m = nlohmann::json::parse(slurp(c->dir + "/manifest.json"));
    EXPECT_EQ(m["tensors"]["w"]["parts"].size(), limit == 45 ? 2u : 3u);
    // Any range of rows, as another world size would ask for it.
    const State s(1);
    for (int64_t first = 0; first < 3; ++first) {
      for (int64_t rows = 0; first + rows <= 3; ++rows) {
        test::Buffer out({rows, 5});
        c->read_rows("w", first, out);
        EXPECT_EQ(std::memcmp(out->data, s.w.f() + first * 5, static_cast<size_t>(rows) * 20), 0);
      }
    }
    test::Buffer wrong({2, 4}), beyond({2, 5});
    EXPECT_THROW(c->read_rows("w", 0, wrong), ContractError);
    EXPECT_THROW(c->read_rows("w", 2, beyond), ContractError);
  }
}

TEST(Checkpoint, RanksWritePartsOfOneTensor) {
  TempDir dir;
  const State s(5);
  const Tensor w = s.w;
  // Rank 1 has no rows of w, rank 2 has two; an empty tensor has no rows anywhere.
  test::Buffer empty({0, 3});
  const auto write = [&](const std::string& tmp, bool all) {
    write_checkpoint_shards(tmp, 0, {{"w", w.slice(0, 1), {3, 5}, 0}, {"m", s.m}, {"empty", empty}});
    write_checkpoint_shards(tmp, 1, {{"w", w.slice(1, 0), {3, 5}, 1}});
    if (all) write_checkpoint_shards(tmp, 2, {{"w", w.slice(1, 2), {3, 5}, 1}});
  };
  const std::string root = dir.path();
  std::string tmp = begin_checkpoint(root, 5);
  write(tmp, true);
  commit_checkpoint(root, 5, tmp, "{}", {});
  const auto c = find_checkpoint(root, nullptr);
  ASSERT_TRUE(c);
  EXPECT_EQ(c->shape("w"), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(std::memcmp(c->tensor("w").data, w.data, 60), 0);
  EXPECT_EQ(c->tensor("empty").numel(), 0);

  tmp = begin_checkpoint(root, 6);
  write(tmp, false);
  expect_in("do not cover its 3 rows", error_of<DataError>([&] { commit_checkpoint(root, 6, tmp, "{}", {}); }));
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "step_00000005"}));

  tmp = begin_checkpoint(root, 7);
  write(tmp, true);
  write_checkpoint_shards(tmp, 3, {{"m", s.m}});  // twice
  expect_in("do not cover", error_of<DataError>([&] { commit_checkpoint(root, 7, tmp, "{}", {}); }));
  EXPECT_EQ(found_step(root), 5);
}

TEST(Checkpoint, LeftoversOfAnInterruptedSaveAreIgnoredThenRemoved) {
  TempDir dir;
  const std::string root = dir.path();
  save(root, 10);
  // Killed while writing shards: complete in every respect but the rename.
  fs::copy(root + "/step_00000010", root + "/.tmp-step_00000020", fs::copy_options::recursive);
  spill(root + "/.tmp-latest-1", "step_0");
  std::vector<RejectedCheckpoint> rejected;
  EXPECT_EQ(found_step(root, &rejected), 10);
  EXPECT_TRUE(rejected.empty());
  save(root, 30);
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "step_00000010", "step_00000030"}));
}

TEST(Checkpoint, CrashBeforeLatestMovesStillFindsTheNewest) {
  TempDir dir;
  const std::string root = dir.path();
  save(root, 10);
  save(root, 20);
  for (const char* latest : {"step_00000010\n", "step_00000099\n", "", "\xff\xfe"}) {
    spill(root + "/latest", latest);
    EXPECT_EQ(found_step(root), 20);
  }
  fs::remove(root + "/latest");
  EXPECT_EQ(found_step(root), 20);
}

TEST(Checkpoint, DamageFallsBackToTheOlderOneAndSaysWhy) {
  struct Case {
    const char* what;
    const char* reason;
    void (*damage)(const std::string& dir);
  };
  const Case cases[] = {
      {"a flipped byte of data", "checksum",
       [](const std::string& d) {
         flip_byte(d + "/shard-00000-00000.safetensors", slurp(d + "/shard-00000-00000.safetensors").size() - 1);
       }},
      {"a truncated shard", "truncated",
       [](const std::string& d) { fs::resize_file(d + "/shard-00000-00000.safetensors", 100); }},
      {"a missing shard", "No such file",
       [](const std::string& d) { fs::remove(d + "/shard-00000-00000.safetensors"); }},
      {"a changed train state", "checksum", [](const std::string& d) { flip_byte(d + "/train_state.json", 5); }},
      {"no train state", "No such file", [](const std::string& d) { fs::remove(d + "/train_state.json"); }},
      {"no manifest", "no manifest.json", [](const std::string& d) { fs::remove(d + "/manifest.json"); }},
      {"an empty manifest", "not JSON", [](const std::string& d) { spill(d + "/manifest.json", ""); }},
      {"half a manifest", "not JSON",
       [](const std::string& d) { fs::resize_file(d + "/manifest.json", fs::file_size(d + "/manifest.json") / 2); }},
      {"another JSON", "not a manifest", [](const std::string& d) { spill(d + "/manifest.json", "{\"format\": 1}"); }},
      {"an array", "not a manifest", [](const std::string& d) { spill(d + "/manifest.json", "[]"); }},
      {"an edited manifest", "own checksum",
       [](const std::string& d) {
         std::string s = slurp(d + "/manifest.json");
         s.replace(s.find("\"step\": 20"), 10, "\"step\": 21");
         spill(d + "/manifest.json", s);
       }},
      {"a later format", "newer Kestrel", [](const std::string& d) { spill(d + "/manifest.json", "{\"format\": 2}"); }},
      {"an empty folder", "no manifest.json",
       [](const std::string& d) {
         fs::remove_all(d);
         fs::create_directory(d);
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    TempDir dir(TempDir::Where::memory);
    const std::string root = dir.path();
    save(root, 10);
    save(root, 20);
    c.damage(root + "/step_00000020");
    std::vector<RejectedCheckpoint> rejected;
    const auto found = find_checkpoint(root, &rejected);
    ASSERT_TRUE(found);
    expect_state(*found, 10);
    ASSERT_EQ(rejected.size(), 1u);
    expect_in("step_00000020", rejected[0].why);
    expect_in(c.reason, rejected[0].why);
    expect_in(c.reason, error_of<DataError>([&] { open_checkpoint(root + "/step_00000020"); }));
    // The resumed run comes to step 20 again.
    save(root, 20);
    rejected.clear();
    EXPECT_EQ(found_step(root, &rejected), 20);
    EXPECT_TRUE(rejected.empty());
  }
}

// Every single byte of every file, changed: never taken for good, never a crash.
TEST(Checkpoint, NoFlippedByteGoesUnnoticed) {
  TempDir dir(TempDir::Where::memory);
  save(dir.path(), 1);
  const std::string step = dir.path("step_00000001");
  const State s(1);
  for (const std::string& name : entries(step)) {
    const std::string file = step + "/" + name;
    const std::string good = slurp(file);
    for (size_t i = 0; i < good.size(); ++i) {
      flip_byte(file, i);
      // White space between the manifest's tokens may change; its content may not.
      if (name == "manifest.json" && isspace(static_cast<unsigned char>(good[i]))) {
        spill(file, good);
        continue;
      }
      EXPECT_THROW(open_checkpoint(step), DataError) << name << " byte " << i;
      spill(file, good);
    }
  }
  expect_state(open_checkpoint(step), 1);
}

TEST(Checkpoint, NewestIsTheOneSavedLast) {
  TempDir dir;
  const std::string root = dir.path();
  save(root, 100);
  save(root, 50);  // a run that was started over in the same folder
  EXPECT_EQ(found_step(root), 50);
  save(root, 60, {.keep = 2});
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "step_00000050", "step_00000060"}));
}

TEST(Checkpoint, RotationKeepsTheNewestAndEveryNth) {
  TempDir dir;
  const std::string root = dir.path();
  fs::create_directory(dir.path("notes"));
  for (int64_t step = 10; step <= 80; step += 10) save(root, step, {.keep = 2, .keep_every = 30});
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "notes", "step_00000030", "step_00000060",
                                                     "step_00000070", "step_00000080"}));
  save(root, 90, {.keep = 1});
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "notes", "step_00000090"}));
  EXPECT_EQ(found_step(root), 90);
}

TEST(Checkpoint, RotationLeavesTheOnlyGoodOne) {
  TempDir dir;
  const std::string root = dir.path();
  save(root, 10);
  save(root, 20);
  flip_byte(root + "/step_00000020/train_state.json", 0);
  save(root, 15, {.keep = 1});  // went on from step 10; its step is lower than the damaged one's
  EXPECT_EQ(found_step(root), 15);
  fs::remove(root + "/step_00000015/manifest.json");
  save(root, 16, {.keep = 1});  // what cannot be read is neither counted nor removed
  EXPECT_EQ(entries(root), (std::vector<std::string>{"latest", "step_00000015", "step_00000016"}));
}

TEST(Checkpoint, FullDiskLeavesThePreviousOnes) {
  TempDir dir;
  const std::string root = dir.path();
  save(root, 10, {.keep = 1});
  const auto before = entries(root);
  test::Buffer big({100'000});
  big.normal(1);
  {
    // The large shard does not fit.
    test::FullDisk disk(100'000);
    const std::string why = error_of<DataError>([&] {
      save_checkpoint(root, 20, {{"big", big, {}}}, "{}", {.keep = 1});
    });
    expect_in("step 20 was not saved", why);
    expect_in("File too large", why);
    expect_in(root, why);
  }
  EXPECT_EQ(entries(root), before);
  {
    // The shard fits, the manifest or the train state does not.
    test::FullDisk disk(1000);
    expect_in("not saved", error_of<DataError>([&] {
                save_checkpoint(root, 20, {}, "\"" + std::string(2000, 'x') + "\"", {.keep = 1});
              }));
  }
  {
    // Not even `latest` can be written.
    test::FullDisk disk(0);
    EXPECT_THROW(save(root, 20, {.keep = 1}), DataError);
  }
  EXPECT_EQ(entries(root), before);
  EXPECT_EQ(slurp(root + "/latest"), "step_00000010\n");
  const auto c = find_checkpoint(root, nullptr);
  ASSERT_TRUE(c);
  expect_state(*c, 10);
}

// A process that does nothing but save is killed at arbitrary moments: what it had finished saving is there, or newer.
TEST(Checkpoint, KilledAtAnyMoment) {
  TempDir dir;
  const std::string root = dir.path();
  int64_t newest = -1;
  for (int round = 0; round < 8; ++round) {
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const int64_t start = newest + 1;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int64_t step = start;; ++step) {
        save(root, step, {.keep = 2, .shard_bytes = 40});
        if (write(pipe_ends[1], &step, sizeof step) != sizeof step) _exit(1);
      }
    }
    close(pipe_ends[1]);
    int64_t reported = -1;
    // After its first save (or its failure) and a bit more, a different bit each round.
    ASSERT_EQ(read(pipe_ends[0], &reported, sizeof reported), static_cast<ssize_t>(sizeof reported));
    usleep(static_cast<useconds_t>(1000 + 1700 * round));
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    while (read(pipe_ends[0], &reported, sizeof reported) == static_cast<ssize_t>(sizeof reported)) {
    }
    close(pipe_ends[0]);
    std::vector<RejectedCheckpoint> rejected;
    const auto c = find_checkpoint(root, &rejected);
    ASSERT_TRUE(c);
    EXPECT_TRUE(rejected.empty()) << rejected[0].why;
    EXPECT_GE(c->step, reported);
    expect_state(*c, c->step);
    newest = c->step;
  }
}

TEST(Checkpoint, UnwritableRoot) {
  TempDir dir;
  spill(dir.path("file"), "x");
  const std::string why = error_of<DataError>([&] { save(dir.path("file"), 1); });
  expect_in("not saved", why);
  expect_in(dir.path("file"), why);
  EXPECT_THROW(save(dir.path("file/below"), 1), DataError);
  EXPECT_EQ(slurp(dir.path("file")), "x");
  EXPECT_THROW(save("/proc/kestrel", 1), DataError);  // where even root may not write
}

TEST(Checkpoint, CallersMistakes) {
  TempDir dir;
  const State s(1);
  EXPECT_THROW(save_checkpoint(dir.path(), 1, s.tensors(), "not json", {}), ContractError);
  EXPECT_THROW(save_checkpoint(dir.path(), -1, s.tensors(), "{}", {}), ContractError);
  EXPECT_THROW(save_checkpoint(dir.path(), 1, {{"w", s.w, {4, 5}}}, "{}", {}), ContractError);
  for (const auto& name : entries(dir.path())) EXPECT_FALSE(name.starts_with("step_")) << name;
}

TEST(Checkpoint, SameBytesForAnyThreadCount) {
  TempDir dir;
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  save(dir.path("one"), 3, {.keep = 0, .shard_bytes = 20});
  omp_set_num_threads(2);
  save(dir.path("two"), 3, {.keep = 0, .shard_bytes = 20});
  omp_set_num_threads(threads);
  for (const auto& name : entries(dir.path("one/step_00000003"))) {
    EXPECT_EQ(slurp(dir.path("one/step_00000003/" + name)), slurp(dir.path("two/step_00000003/" + name))) << name;
  }
}

}  // namespace
}  // namespace kestrel
