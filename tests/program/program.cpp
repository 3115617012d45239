#include "program.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "src/checkpoint/checkpoint.h"
#include "src/data/shard.h"

extern char** environ;

namespace kestrel::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<std::string> environment_of(const CommandOptions& options) {
  // Tiny models gain nothing from threads, and tests run side by side.
  std::map<std::string, std::string> all;
  for (char** e = environ; *e; ++e) {
    const std::string line = *e;
    const size_t eq = line.find('=');
    if (eq != std::string::npos) all[line.substr(0, eq)] = line.substr(eq + 1);
  }
  all.erase("KESTREL_CPU_GEMM");
  all["OMP_NUM_THREADS"] = "1";
  all["LC_ALL"] = "C";
  for (const auto& [name, value] : options.setting) all[name] = value;
  std::vector<std::string> lines;
  for (const auto& [name, value] : all) lines.push_back(name + "=" + value);
  return lines;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> p;
  for (std::string& s : strings) p.push_back(s.data());
  p.push_back(nullptr);
  return p;
}

// Of the forked child: system calls alone until exec.
[[noreturn]] void become(char* const* argv, char* const* env, const char* folder, int out, int err, rlim_t file_limit) {
  if (file_limit > 0) {
    // Ignored by the child, too: a write beyond the limit then fails like one on a full disk.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{file_limit, file_limit};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(126);
  }
  if (*folder && chdir(folder) != 0) _exit(126);
  const int in = open("/dev/null", O_RDONLY);
  if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(126);
  execve(argv[0], argv, env);
  _exit(127);
}

}  // namespace

Process::Process(const Arguments& arguments, const CommandOptions& options) : timeout_s_(options.timeout_s) {
  Arguments copy = arguments;
  std::vector<std::string> lines = environment_of(options);
  const std::vector<char*> argv = pointers(copy), env = pointers(lines);
  const int out = open((dir_ / "out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  const int err = open((dir_ / "err").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  start_ = Clock::now();
  pid_ = fork();
  if (pid_ == 0)
    become(argv.data(), env.data(), options.folder.c_str(), out, err, static_cast<rlim_t>(options.file_limit));
  close(out);
  close(err);
  EXPECT_GT(pid_, 0) << std::strerror(errno);
}

Process::~Process() {
  if (!ended_ && pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

void Process::send(int signal) const {
  if (!ended_) kill(pid_, signal);
}

bool Process::poll() {
  if (ended_) return true;
  int status = 0;
  rusage usage{};
  if (wait4(pid_, &status, WNOHANG, &usage) != pid_) return false;
  ended_ = true;
  outcome_.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome_.peak_bytes = int64_t{usage.ru_maxrss} * 1024;
  outcome_.seconds = seconds_since(start_);
  outcome_.out = read_text(dir_ / "out");
  outcome_.err = read_text(dir_ / "err");
  return true;
}

bool Process::running() {
  return !poll();
}

Outcome Process::wait() {
  while (!poll()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (seconds_since(start_) < timeout_s_ || outcome_.timed_out) continue;
    outcome_.timed_out = true;
    kill(pid_, SIGKILL);
  }
  EXPECT_FALSE(outcome_.timed_out) << "not done after " << timeout_s_ << " s: " << outcome_.all();
  return outcome_;
}

Outcome program(const Arguments& arguments, const CommandOptions& options) {
  Arguments argv = {kProgram};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return Process(argv, options).wait();
}

Outcome shell(const std::string& line, const CommandOptions& options) {
  CommandOptions with_path = options;
  with_path.setting["PATH"] = std::string(KESTREL_BUILD_DIR) + ":" + std::getenv("PATH");
  return Process({"/bin/sh", "-c", line}, with_path).wait();
}

Outcome must(const Outcome& o) {
  EXPECT_EQ(o.code, 0) << o.all();
  return o;
}

void expect_refusal(const Outcome& o, int code, const std::vector<std::string>& pieces) {
  EXPECT_EQ(o.code, code) << o.all();
  EXPECT_EQ(o.err.find("internal error"), std::string::npos) << o.err;
  const size_t at = o.err.find("error: ");
  ASSERT_NE(at, std::string::npos) << o.all();
  const std::string message = o.err.substr(at);
  for (const std::string& piece : pieces) {
    EXPECT_NE(message.find(piece), std::string::npos) << "no \"" << piece << "\" in: " << message;
  }
}

// ---- tiny runs

void write_text(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary);
  out << content;
  ASSERT_TRUE(out.good()) << path;
}

void write_tokens(const std::string& path, int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 rng(seed);
  ShardContents c;
  c.vocab_size = vocab;
  c.token_bytes.assign(static_cast<size_t>(vocab), 1);
  c.text_bytes = count;
  int64_t t = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || rng() % 50 == 0) c.document_starts.push_back(i);
    t = rng() % 4 == 0 ? static_cast<int64_t>(rng() % static_cast<uint64_t>(vocab)) : (5 * t + 3) % vocab;
    c.tokens.push_back(static_cast<int32_t>(t));
  }
  write_shard(path, c);
}

nlohmann::json tiny_run(const std::string& shard, const std::string& out) {
  return {{"model",
           {{"vocab_size", 64},
            {"hidden_size", 32},
            {"num_hidden_layers", 4},
            {"linear_attn_config", {{"full_attn_every", 2}, {"num_heads", 2}, {"head_dim", 16}}},
            {"num_attention_heads", 2},
            {"q_lora_rank", 12},
            {"kv_lora_rank", 16},
            {"qk_nope_head_dim", 8},
            {"qk_rope_head_dim", 4},
            {"v_head_dim", 8},
            {"intermediate_size", 48},
            {"num_experts", 4},
            {"num_experts_per_token", 2},
            {"num_shared_experts", 1},
            {"moe_intermediate_size", 16},
            {"routed_expert_hidden_size", 24},
            {"attn_res_block_size", 2}}},
          {"data", {{"train", {shard}}, {"sequence_length", 24}}},
          {"train", {{"steps", 6}, {"global_batch_size", 4}, {"micro_batch_size", 2}, {"device", "cpu"}}},
          {"optimizer", {{"type", "muon"}}},
          {"schedule", {{"peak_lr", 5e-3}, {"min_lr", 5e-4}, {"warmup_steps", 2}}},
          {"checkpoint", {{"every", 0}}},
          {"log", {{"dir", out}}}};
}

void make_text_data(const std::string& folder) {
  const std::string text = read_text(std::string(KESTREL_FIXTURES) + "/text/kjv_excerpt.txt").substr(0, 40000);
  write_text(folder + "/text.txt", text);
  must(program(
      {"tokenizer", "train", "--vocab-size", "300", "--out", folder + "/tokenizer.json", folder + "/text.txt"}));
  must(program({"data", "build", "--tokenizer", folder + "/tokenizer.json", "--out", folder + "/data",
                "--validation-fraction", "0.1", "--split-documents", "line", folder + "/text.txt"}));
}

// ---- what runs leave

std::vector<nlohmann::json> metrics_of(const std::string& run_dir) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(read_text(run_dir + "/metrics.jsonl"));
  std::string line;
  while (std::getline(in, line)) {
    nlohmann::json j = nlohmann::json::parse(line);
    EXPECT_EQ(j.erase("step_ms"), j.erase("tokens_per_s")) << line;  // an evaluation has neither
    lines.push_back(std::move(j));
  }
  return lines;
}

int64_t steps_logged(const std::string& run_dir) {
  const std::string content = read_text(run_dir + "/metrics.jsonl");
  int64_t n = 0;
  for (size_t at = 0; (at = content.find("\"grad_norm\"", at)) != std::string::npos; ++at) ++n;
  return n;
}

std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& e : std::filesystem::recursive_directory_iterator(folder)) {
    if (e.is_regular_file()) files[std::filesystem::relative(e.path(), folder).string()] = read_text(e.path().string());
  }
  return files;
}

size_t expect_same_tensors(const std::string& a, const std::string& b) {
  const LoadedCheckpoint x = open_checkpoint(a), y = open_checkpoint(b);
  EXPECT_EQ(x.names(), y.names());
  for (const std::string& name : x.names()) {
    const Tensor s = x.tensor(name), t = y.tensor(name);
    EXPECT_TRUE(s.bytes() == t.bytes() && std::memcmp(s.data, t.data, static_cast<size_t>(s.bytes())) == 0)
        << name << " differs between " << a << " and " << b;
  }
  return x.names().size();
}

}  // namespace kestrel::test
