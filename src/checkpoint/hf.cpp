#include "src/checkpoint/hf.h"

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "src/checkpoint/files.h"
#include "src/checkpoint/json_strict.h"
#include "src/checkpoint/nearest.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kPrefix = "language_model.";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

}  // namespace

std::string WeightSource::without_prefix(const std::string& name) {
  return name.starts_with(kPrefix) ? name.substr(std::string(kPrefix).size()) : name;
}

WeightSource::WeightSource(const std::string& dir) : path_(dir) {
  std::error_code ec;
  const fs::path root(dir);
  if (fs::is_regular_file(root, ec)) {
    open_single(dir);
  } else if (fs::exists(root / kIndex, ec)) {
    open_index((root / kIndex).string());
  } else if (fs::exists(root / kSingle, ec)) {
    open_single((root / kSingle).string());
  } else {
    throw DataError(
        text("no weights in ", dir, ": it has neither ", kSingle, " nor ", kIndex,
             fs::exists(root, ec) ? "." : " (it does not exist).",
             " Give the directory of a model in Hugging Face's layout; `kestrel export-hf` makes one of a run or "
             "checkpoint."));
  }
  find_mxfp4();
}

void WeightSource::add(const std::string& name, size_t file) {
  const auto [it, fresh] = where_.try_emplace(without_prefix(name), Place{file, name});
  if (!fresh) {
    throw DataError(text(path_, " has both \"", it->second.name, "\" and \"", name,
                         "\", which are the same tensor to Kestrel. Remove one of them."));
  }
}

void WeightSource::open_single(const std::string& file) {
  files_.emplace_back(file);
  for (const auto& [name, e] : files_[0].entries()) add(name, 0);
}

void WeightSource::open_index(const std::string& index) {
  const json j = parse_json_strict(read_file(index), index);
  if (!j.is_object() || !j.contains("weight_map") || !j["weight_map"].is_object()) {
    throw DataError(text(index, " has no object \"weight_map\" (tensor name -> file)"));
  }
  std::map<std::string, size_t> opened;
  for (const auto& [name, file] : j["weight_map"].items()) {
    const std::string shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.empty() || shard != fs::path(shard).filename().string()) {
      throw DataError(text(index, ": tensor \"", name, "\" lies in ", file.dump(), ", which is no file name"));
    }
    const auto [it, fresh] = opened.try_emplace(shard, files_.size());
    if (fresh) files_.emplace_back((fs::path(index).parent_path() / shard).string());
    if (!files_[it->second].has(name)) {
      throw DataError(text(index, " says that \"", name, "\" lies in ", shard,
                           ", but it does not. The index and the shards are of different downloads."));
    }
    add(name, it->second);
  }
}

void WeightSource::find_mxfp4() {
  const std::string packed = "_packed", scale = "_scale";
  for (const auto& [name, p] : where_) {
    const bool is_packed = name.ends_with(".weight" + packed);
    if (!is_packed && !name.ends_with(".weight" + scale)) continue;
    const std::string& own = is_packed ? packed : scale;
    const std::string base = name.substr(0, name.size() - own.size());
    const std::string other = base + (is_packed ? scale : packed);
    if (where_.count(other) == 0) {
      throw DataError(text(path_, " has \"", name, "\" but no \"", other,
                           "\": an MXFP4 weight needs both. A shard is missing from the download."));
    }
    if (is_packed) mxfp4_.push_back(base);
  }
}

std::vector<std::string> WeightSource::files() const {
  std::vector<std::string> out = {(fs::path(path_) / kIndex).string()};
  for (const SafetensorsFile& f : files_) out.push_back(f.path());
  return out;
}

std::vector<std::string> WeightSource::names() const {
  std::vector<std::string> out;
  for (const auto& [name, p] : where_) out.push_back(name);
  return out;
}

const WeightSource::Place& WeightSource::place(const std::string& name) const {
  const auto it = where_.find(without_prefix(name));
  if (it == where_.end()) throw DataError(text(path_, " has no tensor \"", name, "\".", name_hint(name, where_)));
  return it->second;
}

const SafetensorsFile::Entry& WeightSource::entry(const std::string& name) const {
  const Place& p = place(name);
  return files_[p.file].entry(p.name);
}

Tensor WeightSource::tensor(const std::string& name) const {
  const Place& p = place(name);
  return files_[p.file].tensor(p.name);
}

namespace {

std::vector<std::vector<NamedTensor>> pack(const std::vector<NamedTensor>& tensors, int64_t shard_bytes) {
  std::vector<std::vector<NamedTensor>> shards(1);
  int64_t bytes = 0;
  for (const NamedTensor& t : tensors) {
    if (!shards.back().empty() && bytes + t.tensor.bytes() > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += t.tensor.bytes();
    shards.back().push_back(t);
  }
  return shards;
}

void write_weights(const fs::path& dir, const std::vector<NamedTensor>& tensors, int64_t shard_bytes) {
  const std::map<std::string, std::string> metadata{{"format", "pt"}};  // what the readers of that layout look for
  const auto shards = pack(tensors, shard_bytes);
  if (shards.size() == 1) return write_safetensors((dir / kSingle).string(), tensors, metadata);
  int64_t total = 0;
  json map = json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    write_safetensors((dir / name).string(), shards[i], metadata);
    for (const NamedTensor& t : shards[i]) {
      KESTREL_CHECK(!map.contains(t.name), "tensor name ", t.name, " twice");
      map[t.name] = name;
      total += t.tensor.bytes();
    }
  }
  const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
  write_file((dir / kIndex).string(), index.dump(2) + "\n");
}

}  // namespace

void write_hf_model(const std::string& dir, const std::vector<NamedTensor>& tensors, const std::string& config_json,
                    int64_t shard_bytes, const std::map<std::string, std::string>& more_files) {
  KESTREL_CHECK(shard_bytes > 0, "shard_bytes ", shard_bytes);
  // An absolute path without a trailing slash has a parent and a name.
  fs::path target = fs::absolute(dir).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  const fs::path temporary = target.parent_path() / (".tmp-" + target.filename().string());
  std::error_code ec;
  if (fs::exists(target, ec) && !(fs::is_directory(target, ec) && fs::is_empty(target, ec))) {
    throw DataError(text("cannot export to ", dir, ": it exists and is not an empty folder. Remove it, or choose ",
                         "another name; nothing is overwritten."));
  }
  try {
    fs::remove_all(temporary);  // of an export that was interrupted
    fs::create_directories(temporary);
    write_weights(temporary, tensors, shard_bytes);
    for (const auto& [name, content] : more_files) write_file((temporary / name).string(), content);
    write_file((temporary / "config.json").string(), config_json);
    fs::rename(temporary, target);
    sync_directory(target.parent_path().string());
  } catch (const std::system_error& e) {
    fs::remove_all(temporary, ec);
    throw DataError(text("cannot export to ", dir, ": ", e.what(), ". Choose a folder that may be written."));
  } catch (...) {
    fs::remove_all(temporary, ec);
    throw;
  }
}

}  // namespace kestrel
