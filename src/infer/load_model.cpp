#include "src/infer/load_model.h"

#include <cstring>
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

void make_model(InferenceModel& m) {
  m.model = std::make_unique<Model>(m.config);
  m.model->parameters().allocate(Device::cpu, DType::f32, /*gradients=*/false);
}

void from_checkpoint(InferenceModel& m, const LoadedCheckpoint& c) {
  m.source = c.dir;
  m.step = c.step;
  const auto state = parse_json_strict(c.train_state_json, c.dir + "/train_state.json");
  if (!state.contains("config"))
    throw DataError(text(c.dir, ": train_state.json holds no config. It was not written by kestrel train."));
  m.run = parse_run_config(state["config"].dump(), c.dir + "/train_state.json");
  m.config = m.run->model;
  m.trained_with = state.value(nlohmann::json::json_pointer("/data/tokenizer"), "");
  make_model(m);
  const HostTensors weights = weights_of(m.model->parameters());  // views: the model is on the CPU
  for (const NamedTensor& t : weights.list()) {
    const Tensor in = c.tensor(t.name);
    if (in.dtype != DType::f32 || in.numel() != t.tensor.numel())
      throw DataError(text(c.dir, ": tensor \"", t.name, "\" is ", in.describe(), ", expected ", t.tensor.describe()));
    std::memcpy(t.tensor.data, in.data, static_cast<size_t>(in.bytes()));
  }
}

void from_hf(InferenceModel& m, const std::string& dir) {
  m.source = dir;
  m.config = parse_model_config(read_file(dir + "/config.json"), dir + "/config.json");
  make_model(m);
  load_weights(m.model->parameters(), WeightSource(dir));
}

}  // namespace

const Tokenizer& InferenceModel::need_tokenizer() const {
  if (!tokenizer) throw ConfigError(text(source, " names no tokenizer. Give one with --tokenizer tokenizer.json."));
  return *tokenizer;
}

InferenceModel load_model(const std::string& path, const std::optional<std::string>& tokenizer) {
  InferenceModel m;
  const fs::path p(path);
  std::vector<std::string> rejected;
  if (fs::exists(p / "manifest.json")) {
    from_checkpoint(m, open_checkpoint(path));
  } else if (fs::exists(p / "model.safetensors") || fs::exists(p / "model.safetensors.index.json")) {
    from_hf(m, path);
  } else if (fs::exists(p / "config.json")) {
    const RunConfig run = parse_run_config(read_file(p / "config.json"), p / "config.json");
    const auto found = find_checkpoint(run.checkpoint.dir, &rejected);
    if (!found) {
      std::string why;
      for (const std::string& r : rejected) why += "\n  " + r;
      throw DataError(text(path, ": no good checkpoint in ", run.checkpoint.dir, why,
                           "\nTrain first, or name a checkpoint folder."));
    }
    from_checkpoint(m, *found);
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
