#include "src/infer/load_model.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/files.h"
#include "src/checkpoint/hf.h"
#include "src/checkpoint/json_strict.h"
#include "src/model/weights.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;

struct Place {
  Device device;
  DType working;
};

void make_model(InferenceModel& m, const Place& at) {
  m.model = std::make_unique<Model>(m.config);
  m.model->parameters().allocate(at.device, at.working, /*gradients=*/false);
}

void from_checkpoint(InferenceModel& m, const LoadedCheckpoint& c, const Place& at) {
  m.source = c.dir;
  m.step = c.step;
  const auto state = parse_json_strict(c.train_state_json, c.dir + "/train_state.json");
  if (!state.contains("config"))
    throw DataError(text(c.dir, ": train_state.json holds no config. It was not written by kestrel train."));
  m.run = parse_run_config(state["config"].dump(), c.dir + "/train_state.json");
  m.config = m.run->model;
  m.trained_with = state.value(nlohmann::json::json_pointer("/data/tokenizer"), "");
  make_model(m, at);
  load_weights(m.model->parameters(), c);
}

void from_hf(InferenceModel& m, const std::string& dir, const Place& at) {
  m.source = dir;
  m.config = parse_model_config(read_file(dir + "/config.json"), dir + "/config.json");
  make_model(m, at);
  load_weights(m.model->parameters(), WeightSource(dir));
}

// Where the checkpoints of the run directory `path` are.  Inside the directory that the run was made in they are inside
// `path`, which may be a copy, have been moved, or be seen from another folder; elsewhere they are where the run says.
std::string checkpoints_of(const std::string& path) {
  const std::string file = (fs::path(path) / "config.json").string();
  const RunConfig run = parse_run_config(read_file(file), file);
  const auto whole = [](const std::string& dir) { return fs::absolute(dir).lexically_normal(); };
  const fs::path inside = whole(run.checkpoint.dir).lexically_relative(whole(run.log.dir));
  if (*inside.begin() == "..") return run.checkpoint.dir;
  return inside == "." ? path : (fs::path(path) / inside).string();
}

}  // namespace

const Tokenizer& InferenceModel::need_tokenizer() const {
  if (!tokenizer) throw ConfigError(text(source, " names no tokenizer. Give one with --tokenizer tokenizer.json."));
  return *tokenizer;
}

InferenceModel load_model(const std::string& path, const std::optional<std::string>& tokenizer, Device device,
                          DType working) {
  const Place at{device, working};
  InferenceModel m;
  const fs::path p(path);
  if (fs::exists(p / "manifest.json")) {
    from_checkpoint(m, open_checkpoint(path), at);
  } else if (fs::exists(p / "model.safetensors") || fs::exists(p / "model.safetensors.index.json")) {
    from_hf(m, path, at);
  } else if (fs::exists(p / "config.json")) {
    const std::string checkpoints = checkpoints_of(path);
    std::vector<RejectedCheckpoint> rejected;
    const auto found = find_checkpoint(checkpoints, &rejected);
    if (!found) {
      throw DataError(text(path, ": no good checkpoint in ", checkpoints, list_of(rejected),
                           "\nTrain first, or name a checkpoint folder."));
    }
    from_checkpoint(m, *found, at);
  } else {
    throw DataError(text(
        path,
        " is neither a run directory, nor a checkpoint, nor a directory with model.safetensors and config.json. Name "
        "one of them; `kestrel train` makes the first two."));
  }
  std::optional<std::string> own;
  if (m.run && m.run->data.tokenizer) own = m.run->data.tokenizer;
  if (!own && fs::exists(p / "tokenizer.json")) own = (p / "tokenizer.json").string();
  const std::optional<std::string> file = tokenizer ? tokenizer : own;
  if (!file) return m;
  m.tokenizer = Tokenizer::load(*file);
  if (m.trained_with.empty() && own && fs::exists(*own)) m.trained_with = Tokenizer::load(*own).fingerprint();
  check_same_tokenizer(m.source, m.trained_with, *file, m.tokenizer->fingerprint());
  if (m.tokenizer->vocab_size() > m.config.vocab_size) {
    throw DataError(text("the tokenizer ", *file, " has ", m.tokenizer->vocab_size(), " tokens, the model of ",
                         m.source, " only ", m.config.vocab_size, ": it belongs to another model."));
  }
  return m;
}

}  // namespace kestrel
