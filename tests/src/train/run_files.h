// Small runs for the trainer's tests: the golden training runs as run files, in folders of their own.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "src/config/run_config.h"
#include "tests/support.h"

namespace kestrel::test {

inline std::string read_text(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// A fresh folder under the system's temporary directory, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kestrel_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline nlohmann::json golden_trace(const std::string& name) {
  return nlohmann::json::parse(read_text(std::string(KESTREL_FIXTURES) + "/" + name + "/trace.json"));
}

// The run of a train_* fixture, writing into `out`.
inline nlohmann::json golden_run(const std::string& name, const std::string& out) {
  const std::string dir = std::string(KESTREL_FIXTURES) + "/" + name;
  const nlohmann::json h = golden_trace(name)["hyper"];
  nlohmann::json run;
  run["model"] = nlohmann::json::parse(read_text(dir + "/config.json"));
  run["model"]["balancing"] = {{"method", "quantile"}, {"bins", h["qb_bins"]}};
  run["data"] = {{"train", {dir + "/tokens.safetensors"}},
                 {"validation", {dir + "/tokens.safetensors"}},
                 {"sequence_length", h["sequence_length"]},
                 {"shuffle", false}};
  run["train"] = {{"steps", h["total_steps"]},
                  {"global_batch_size", h["micro_batches"].get<int>() * h["micro_batch_size"].get<int>()},
                  {"micro_batch_size", h["micro_batch_size"]},
                  {"device", "cpu"},
                  {"precision", "fp32"},
                  {"init_from", dir}};
  run["optimizer"] = {{"per_head", h["per_head_muon"]}, {"weight_decay", h["weight_decay"]},
                      {"grad_clip", h["grad_clip"]},    {"momentum", h["muon_momentum"]},
                      {"nesterov", h["muon_nesterov"]}, {"beta1", h["adam_beta1"]},
                      {"beta2", h["adam_beta2"]},       {"eps", h["adam_eps"]}};
  run["schedule"] = {
      {"kind", h["schedule"]}, {"peak_lr", h["peak_lr"]}, {"min_lr", h["min_lr"]}, {"warmup_steps", h["warmup_steps"]}};
  run["checkpoint"] = {{"every", 0}};
  run["log"] = {{"dir", out}};
  return run;
}

inline RunConfig parse(const nlohmann::json& run, const std::vector<std::string>& overrides = {}) {
  return parse_run_config(run.dump(), "test run", overrides);
}

}  // namespace kestrel::test
