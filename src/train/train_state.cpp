#include "src/train/train_state.h"

#include <algorithm>

#include "kernels/core/error.h"
#include "src/checkpoint/json_strict.h"

namespace kestrel {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kFormat = 1;

struct Difference {
  std::string path, there, here;
};

void find_differences(const json& there, const json& here, const std::string& path, std::vector<Difference>& out) {
  for (const auto& [key, value] : here.items()) {
    const json other = there.is_object() && there.contains(key) ? there[key] : json();
    if (other == value) continue;
    if (value.is_object()) {
      find_differences(other, value, path + key + ".", out);
    } else {
      out.push_back({path + key, other.dump(), value.dump()});
    }
  }
}

std::vector<Difference> differences(const std::string& there, const std::string& here, const std::string& path) {
  std::vector<Difference> out;
  find_differences(json::parse(there), json::parse(here), path, out);
  return out;
}

}  // namespace

std::string TrainState::to_json() const {
  ordered_json j;
  j["format"] = kFormat;
  j["step"] = step;
  j["updates"] = updates;
  j["tokens"] = tokens;
  j["skipped"] = skipped;
  j["skipped_in_a_row"] = skipped_in_a_row;
  j["model_hash"] = model_hash;
  j["data"] = {{"fingerprint", data_fingerprint},
               {"sequence_length", sequence_length},
               {"global_batch_size", global_batch_size},
               {"seed", data_seed},
               {"shuffle", shuffle},
               {"tokenizer", tokenizer}};
  j["optimizer_type"] = optimizer_type;
  j["model"] = ordered_json::parse(model_json);
  j["config"] = ordered_json::parse(config_json);
  return j.dump(1);
}

TrainState TrainState::from_json(const std::string& content, const std::string& where) {
  const json j = parse_json_strict(content, where);
  TrainState s;
  try {
    if (j.at("format").get<int>() != kFormat)
      throw DataError(text(where, ": train state of format ", j.at("format").dump(), ", this program reads ", kFormat));
    s.step = j.at("step");
    s.updates = j.at("updates");
    s.tokens = j.at("tokens");
    s.skipped = j.at("skipped");
    s.skipped_in_a_row = j.at("skipped_in_a_row");
    s.model_hash = j.at("model_hash");
    s.model_json = j.at("model").dump();
    s.config_json = j.at("config").dump();
    const json& d = j.at("data");
    s.data_fingerprint = d.at("fingerprint");
    s.sequence_length = d.at("sequence_length");
    s.global_batch_size = d.at("global_batch_size");
    s.data_seed = d.at("seed");
    s.shuffle = d.at("shuffle");
    s.tokenizer = d.value("tokenizer", "");  // checkpoints of older programs lack it
    s.optimizer_type = j.at("optimizer_type");
  } catch (const json::exception& e) {
    throw DataError(text(where, ": train_state.json lacks a field or has one of another type (", e.what(),
                         "). It was not written by this program."));
  }
  return s;
}

void check_resumable(const TrainState& saved, const TrainState& run, int64_t total_steps,
                     const std::string& checkpoint) {
  const std::string fresh = " To start over instead, choose another checkpoint.dir or set checkpoint.resume=never.";
  if (saved.model_hash != run.model_hash) {
    const std::vector<Difference> all = differences(saved.model_json, run.model_json, "model.");
    std::string list;
    for (size_t i = 0; i < std::min<size_t>(all.size(), 5); ++i)
      list += text("\n  ", all[i].path, ": ", all[i].there, " there, ", all[i].here, " here");
    throw DataError(text(checkpoint, " is a checkpoint of another model: ", all.size(), " field(s) differ", list,
                         all.size() > 5 ? "\n  ..." : "", "\nUse the run file it was made with.", fresh));
  }
  const auto same = [&](const char* field, const auto& there, const auto& here) {
    if (there == here) return;
    throw DataError(text(checkpoint, " was saved with ", field, " = ", there, ", this run has ", here,
                         ": the resumed run would not see the rows the first one left.", fresh));
  };
  same("data.sequence_length", saved.sequence_length, run.sequence_length);
  same("train.global_batch_size", saved.global_batch_size, run.global_batch_size);
  same("data.seed", saved.data_seed, run.data_seed);
  same("data.shuffle", saved.shuffle, run.shuffle);
  same("training data of fingerprint", saved.data_fingerprint, run.data_fingerprint);
  if (saved.optimizer_type != run.optimizer_type) {
    throw DataError(text(checkpoint, " holds the state of optimizer.type=", saved.optimizer_type, ", this run uses ",
                         run.optimizer_type,
                         ": their moments are not interchangeable. To go on from its weights alone, export them "
                         "(kestrel export-hf) and set train.init_from."));
  }
  if (saved.step > total_steps) {
    throw ConfigError(text(checkpoint, " is at step ", saved.step, ", beyond this run's ", total_steps,
                           " steps. Raise train.steps, or set checkpoint.resume=never."));
  }
}

std::vector<std::string> changed_fields(const TrainState& saved, const TrainState& run) {
  std::vector<std::string> out;
  for (const Difference& d : differences(saved.config_json, run.config_json, ""))
    out.push_back(text(d.path, ": ", d.there, " -> ", d.here));
  return out;
}

}  // namespace kestrel
