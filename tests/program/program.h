// Driving the built program as a user does: commands with a time limit, their output and exit code, and tiny runs.
#pragma once

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/src/train/run_files.h"

namespace kestrel::test {

using Arguments = std::vector<std::string>;

struct CommandOptions {
  std::string folder;                          // working directory; empty: the caller's
  std::map<std::string, std::string> setting;  // environment on top of the caller's and of OMP_NUM_THREADS=1
  int64_t file_limit = 0;  // bytes a file may grow to (a disk that fills: writes beyond fail with EFBIG); 0: no limit
  double timeout_s = 120;
};

struct Outcome {
  int code = -1;  // exit code; 128 + signal of a killed command
  bool timed_out = false;
  std::string out, err;
  double seconds = 0;
  int64_t peak_bytes = 0;  // resident memory

  std::string all() const { return out + err; }
};

// A command in flight.  Killed at the end of the object's life.
class Process {
 public:
  // The program is argv[0]; its output goes to files of a folder of its own.
  Process(const Arguments& argv, const CommandOptions& options = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void send(int signal) const;
  bool running();
  Outcome wait();  // kills it when the time is up

 private:
  bool poll();  // has it ended?

  TempDir dir_;
  int pid_ = -1;
  std::chrono::steady_clock::time_point start_;
  double timeout_s_;
  bool ended_ = false;
  Outcome outcome_;
};

inline const std::string kProgram = std::string(KESTREL_BUILD_DIR) + "/kestrel";

Outcome program(const Arguments& arguments, const CommandOptions& options = {});
Outcome shell(const std::string& line, const CommandOptions& options = {});  // `kestrel` is on its PATH

// The outcome of a command that must succeed: a failure of the test with all its output otherwise.
Outcome must(const Outcome& o);
// A refused command: its exit code, and every piece in its message.
void expect_refusal(const Outcome& o, int code, const std::vector<std::string>& pieces);

// ---- tiny runs

void write_text(const std::string& path, const std::string& content);

// Ids in [0, vocab): each follows from the one before up to noise, so there is something to learn.  Documents of about
// 50 tokens, one byte of text a token.
void write_tokens(const std::string& path, int64_t count, int64_t vocab = 64, uint64_t seed = 1);

// Four layers (KDA, MLA, KDA, MLA), one dense, three with experts, three blocks of depth; rows of 24 tokens of `shard`;
// six steps.  About 2 ms a step.
nlohmann::json tiny_run(const std::string& shard, const std::string& out);

// One text cut into a training and a validation shard with a tokenizer of 300 ids, by the program's own commands:
// tokenizer.json, data/train-00000.safetensors, data/validation-00000.safetensors in `folder`.
void make_text_data(const std::string& folder);

// ---- what runs leave

// metrics.jsonl without the two fields of time, a line each.
std::vector<nlohmann::json> metrics_of(const std::string& run_dir);
// Steps with a loss in it so far; 0 when there is no file yet.
int64_t steps_logged(const std::string& run_dir);
// Every file below `folder` with its content.
std::map<std::string, std::string> files_of(const std::string& folder);
// Every tensor of two checkpoint folders is the same bits; the number of them.
size_t expect_same_tensors(const std::string& a, const std::string& b);

}  // namespace kestrel::test
