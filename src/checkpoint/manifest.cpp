#include "src/checkpoint/manifest.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "kernels/core/error.h"
#include "kernels/core/parallel.h"
#include "src/checkpoint/files.h"
#include "src/checkpoint/hash.h"
#include "src/checkpoint/json_strict.h"
#include "src/checkpoint/safetensors.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 1;

std::string in(const std::string& dir, const std::string& file) {
  return (fs::path(dir) / file).string();
}

json to_json(const Manifest& m) {
  json j = {{"format", kFormat}, {"step", m.step}, {"sequence", m.sequence}};
  j["files"] = json::object();
  for (const auto& [name, f] : m.files) j["files"][name] = {{"bytes", f.bytes}, {"xxh64", f.xxh64}};
  j["tensors"] = json::object();
  for (const auto& [name, t] : m.tensors) {
    json parts = json::array();
    for (const auto& p : t.parts) parts.push_back({{"file", p.file}, {"first", p.first}, {"rows", p.rows}});
    j["tensors"][name] = {{"dtype", name_of(t.dtype)}, {"shape", t.shape}, {"parts", std::move(parts)}};
  }
  return j;
}

Manifest from_json(const json& j, const std::string& path) {
  Manifest m;
  m.step = j.at("step").get<int64_t>();
  m.sequence = j.at("sequence").get<int64_t>();
  for (const auto& [name, f] : j.at("files").items()) {
    if (name != fs::path(name).filename().string()) {
      throw DataError(text(path, " names the file \"", name, "\" outside its folder. The checkpoint is damaged."));
    }
    m.files[name] = {f.at("bytes").get<int64_t>(), f.at("xxh64").get<std::string>()};
  }
  for (const auto& [name, t] : j.at("tensors").items()) {
    const auto dtype = dtype_from_name(t.at("dtype").get<std::string>());
    if (!dtype) throw DataError(text(path, ": tensor \"", name, "\" has a type Kestrel does not read: ", t.dump()));
    Manifest::Tensor& out = m.tensors[name];
    out.dtype = *dtype;
    out.shape = t.at("shape").get<std::vector<int64_t>>();
    for (const auto& p : t.at("parts")) {
      out.parts.push_back({p.at("file").get<std::string>(), p.at("first").get<int64_t>(), p.at("rows").get<int64_t>()});
    }
  }
  return m;
}

// Empty when the file is as the manifest says, else what is wrong.
std::string file_damage(const std::string& path, const Manifest::File& expected) {
  std::error_code ec;
  const auto bytes = fs::file_size(path, ec);
  if (ec) return text(path, ": ", ec.message());
  if (bytes != static_cast<uintmax_t>(expected.bytes)) {
    return text(path, " has ", bytes, " bytes, its manifest says ", expected.bytes, ": it is truncated or was changed");
  }
  const std::string sum = xxh64_of_file(path);
  if (sum == expected.xxh64) return {};
  return text(path, " has checksum ", sum, ", its manifest says ", expected.xxh64, ": its bytes were changed");
}

// fn(name of the file) for all files, several at a time when there is much to read; throws the first error by name.
template <class F>
void for_each_file(const Manifest& m, F&& fn) {
  std::vector<std::string> names;
  int64_t bytes = 0;
  for (const auto& [name, f] : m.files) {
    names.push_back(name);
    bytes += f.bytes;
  }
  std::vector<std::string> errors(names.size());
  const auto one = [&](int64_t i) {
    const auto k = static_cast<size_t>(i);
    try {
      fn(names[k]);
    } catch (const std::exception& e) {
      errors[k] = e.what();
    }
  };
  constexpr int64_t kMuch = int64_t{16} << 20;  // below, starting the threads takes longer than reading
  const auto count = static_cast<int64_t>(names.size());
  if (bytes < kMuch) {
    for (int64_t i = 0; i < count; ++i) one(i);
  } else {
    parallel_for_dynamic(count, one);
  }
  for (const auto& e : errors) {
    if (!e.empty()) throw DataError(e);
  }
}

}  // namespace

Manifest read_manifest(const std::string& dir) {
  const std::string path = in(dir, kManifestFile);
  std::error_code ec;
  if (!fs::exists(path, ec)) {
    throw DataError(text(dir, " has no ", kManifestFile,
                         ": it is no checkpoint, or one that was copied in part. Use another checkpoint."));
  }
  json j = parse_json_strict(read_file(path), path);
  try {
    if (const auto format = j.at("format").get<int>(); format > kFormat) {
      throw DataError(
          text(path, " has format ", format, ", this program reads up to ", kFormat, ". Use a newer Kestrel."));
    }
    const std::string sum = j.at("xxh64").get<std::string>();
    j.erase("xxh64");
    if (xxh64_hex(j.dump()) != sum) {
      throw DataError(text(path, " does not match its own checksum ", sum, ": its bytes were changed"));
    }
    Manifest m = from_json(j, path);
    if (!m.files.count(kTrainStateFile)) throw DataError(text(path, " does not list ", kTrainStateFile));
    return m;
  } catch (const json::exception& e) {
    throw DataError(text(path, " is not a manifest of Kestrel: ", e.what(), ". The checkpoint is damaged."));
  }
}

void write_manifest(const std::string& dir, const Manifest& m) {
  json j = to_json(m);
  j["xxh64"] = xxh64_hex(j.dump());
  write_file(in(dir, kManifestFile), j.dump(1) + "\n");
}

void verify_files(const std::string& dir, const Manifest& m) {
  for_each_file(m, [&](const std::string& name) {
    const std::string damage = file_damage(in(dir, name), m.files.at(name));
    if (!damage.empty()) throw DataError(damage);
  });
}

void check_coverage(const std::string& dir, const Manifest& m) {
  for (const auto& [name, t] : m.tensors) {
    int64_t row = 0;
    bool good = !t.parts.empty();
    for (const auto& p : t.parts) {
      good = good && p.first == row && p.rows >= 0;
      row += p.rows;
    }
    if (good && row == t.rows()) continue;
    throw DataError(text("checkpoint ", dir, ": the ", t.parts.size(), " part(s) of tensor \"", name,
                         "\" do not cover its ", t.rows(), " rows once each (they go wrong at or before row ", row,
                         "). A rank's file is missing or of another save."));
  }
}

std::string part_key(const std::string& tensor) {
  return "part." + tensor;
}

std::string part_record(const std::vector<int64_t>& global_shape, int64_t first) {
  return json{{"global_shape", global_shape}, {"first", first}}.dump();
}

namespace {

// Enters the tensors of one shard.
void describe_shard(const std::string& dir, const std::string& name, Manifest& m) {
  const SafetensorsFile file(in(dir, name));
  for (const auto& [tensor, e] : file.entries()) {
    const auto record = file.metadata().find(part_key(tensor));
    Manifest::Tensor seen{e.dtype, e.shape, {}};
    Manifest::Part part{name, 0, e.shape.empty() ? 1 : e.shape[0]};
    if (record != file.metadata().end()) {
      const json r = json::parse(record->second);
      seen.shape = r.at("global_shape").get<std::vector<int64_t>>();
      part.first = r.at("first").get<int64_t>();
    }
    Manifest::Tensor& t = m.tensors.try_emplace(tensor, seen).first->second;
    if (t.dtype != seen.dtype || t.shape != seen.shape) {
      throw DataError(text("checkpoint ", dir, ": the parts of tensor \"", tensor,
                           "\" differ in type or global shape (seen in ", name, ")"));
    }
    t.parts.push_back(std::move(part));
  }
}

}  // namespace

Manifest describe_folder(const std::string& dir, int64_t step) {
  Manifest m;
  m.step = step;
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(dir)) {
    const std::string name = e.path().filename().string();
    if (name == kManifestFile || name.starts_with(kTemporaryPrefix)) continue;
    names.push_back(name);
    m.files[name].bytes = static_cast<int64_t>(e.file_size());
  }
  std::sort(names.begin(), names.end());
  for (const auto& name : names) {
    if (fs::path(name).extension() == ".safetensors") describe_shard(dir, name, m);
  }
  for (auto& [name, t] : m.tensors) {
    // An empty part and the one after it start at the same row.
    std::sort(t.parts.begin(), t.parts.end(), [](const Manifest::Part& a, const Manifest::Part& b) {
      return a.first != b.first ? a.first < b.first : a.rows < b.rows;
    });
  }
  for_each_file(m, [&](const std::string& name) { m.files.at(name).xxh64 = xxh64_of_file(in(dir, name)); });
  return m;
}

std::string folder_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return "step_" + digits;
}

std::vector<CheckpointFolder> list_checkpoints(const std::string& root) {
  std::vector<CheckpointFolder> found;
  std::error_code ec;
  if (!fs::exists(root, ec)) return found;
  fs::directory_iterator entries(root, ec);
  if (ec) throw DataError(text("cannot list the checkpoints under ", root, ": ", ec.message()));
  for (const auto& e : entries) {
    CheckpointFolder f;
    f.path = e.path().string();
    f.name = e.path().filename().string();
    if (!f.name.starts_with("step_") || !e.is_directory(ec)) continue;
    const char* end = f.name.data() + f.name.size();
    const auto [stop, error] = std::from_chars(f.name.data() + 5, end, f.step);
    if (error != std::errc() || stop != end || f.name != folder_name(f.step)) continue;  // not a name we give
    try {
      const Manifest m = read_manifest(f.path);
      f.sequence = m.sequence;
      if (m.step != f.step) f.damage = text(f.path, " holds step ", m.step, ": the folder was renamed");
    } catch (const DataError& error_) {
      f.damage = error_.what();
    }
    found.push_back(std::move(f));
  }
  std::sort(found.begin(), found.end(), [](const CheckpointFolder& a, const CheckpointFolder& b) {
    if (a.damage.empty() != b.damage.empty()) return b.damage.empty();
    return a.damage.empty() && a.sequence != b.sequence ? a.sequence > b.sequence : a.step > b.step;
  });
  return found;
}

}  // namespace kestrel
