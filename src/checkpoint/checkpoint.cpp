// Opening checkpoints; saving them is save.cpp.
#include "src/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "src/checkpoint/files.h"
#include "src/checkpoint/hash.h"
#include "src/checkpoint/manifest.h"
#include "src/checkpoint/nearest.h"

namespace kestrel {

struct LoadedCheckpoint::Contents {
  std::string dir;
  Manifest manifest;
  std::map<std::string, SafetensorsFile> files;
  std::mutex mutex;                                              // guards assembled
  std::map<std::string, std::unique_ptr<uint64_t[]>> assembled;  // tensors that lie in several parts

  const Manifest::Tensor& at(const std::string& name) const {
    const auto it = manifest.tensors.find(name);
    if (it == manifest.tensors.end()) {
      throw DataError(text("checkpoint ", dir, " has no tensor \"", name, "\".", name_hint(name, manifest.tensors)));
    }
    return it->second;
  }

  // Copies rows [first, first + rows) to `out`.
  void copy_rows(const std::string& name, int64_t first, int64_t rows, char* out) const {
    const Manifest::Tensor& t = at(name);
    const int64_t row_bytes = t.row_bytes();
    for (const Manifest::Part& p : t.parts) {
      const int64_t a = std::max(first, p.first), b = std::min(first + rows, p.first + p.rows);
      if (a >= b || row_bytes == 0) continue;
      const auto* data = static_cast<const char*>(files.at(p.file).entry(name).data);
      std::memcpy(out + (a - first) * row_bytes, data + (a - p.first) * row_bytes,
                  static_cast<size_t>((b - a) * row_bytes));
    }
  }
};

namespace {

// Every part is in its file as the manifest says.
void check_parts(const std::string& dir, const Manifest& m, const std::map<std::string, SafetensorsFile>& files) {
  for (const auto& [name, t] : m.tensors) {
    for (const Manifest::Part& p : t.parts) {
      const auto bad = [&, &key = name](const std::string& why) {
        return DataError(text("checkpoint ", dir, ": tensor \"", key, "\" ", why, " ", p.file, ". It is damaged."));
      };
      const auto file = files.find(p.file);
      if (file == files.end() || !file->second.has(name)) throw bad("is not in");
      const auto& e = file->second.entry(name);
      std::vector<int64_t> expected = t.shape;
      if (!expected.empty()) expected[0] = p.rows;
      if (e.dtype != t.dtype || e.shape != expected) throw bad("has another type or shape in");
    }
  }
}

}  // namespace

LoadedCheckpoint open_checkpoint(const std::string& dir, bool verify) {
  auto contents = std::make_shared<LoadedCheckpoint::Contents>();
  contents->dir = dir;
  contents->manifest = read_manifest(dir);
  const Manifest& m = contents->manifest;
  if (verify) verify_files(dir, m);
  for (const auto& [name, file] : m.files) {
    if (std::filesystem::path(name).extension() == ".safetensors") {
      contents->files.emplace(name, SafetensorsFile((std::filesystem::path(dir) / name).string()));
    }
  }
  check_coverage(dir, m);
  check_parts(dir, m, contents->files);
  LoadedCheckpoint c;
  c.dir = dir;
  c.step = m.step;
  c.train_state_json = read_file((std::filesystem::path(dir) / kTrainStateFile).string());
  c.contents_ = std::move(contents);
  return c;
}

bool LoadedCheckpoint::has(const std::string& name) const {
  return contents_->manifest.tensors.count(name) != 0;
}

std::vector<std::string> LoadedCheckpoint::names() const {
  std::vector<std::string> out;
  for (const auto& [name, t] : contents_->manifest.tensors) out.push_back(name);
  return out;
}

std::vector<int64_t> LoadedCheckpoint::shape(const std::string& name) const {
  return contents_->at(name).shape;
}

DType LoadedCheckpoint::dtype(const std::string& name) const {
  return contents_->at(name).dtype;
}

Tensor LoadedCheckpoint::tensor(const std::string& name) const {
  const Manifest::Tensor& t = contents_->at(name);
  if (t.parts.size() == 1) return contents_->files.at(t.parts[0].file).tensor(name);
  if (t.shape.size() > 4) {
    throw DataError(
        text("checkpoint ", dir, ": tensor \"", name, "\" has ", t.shape.size(), " dimensions, at most 4 are read"));
  }
  const std::lock_guard lock(contents_->mutex);
  auto& memory = contents_->assembled[name];
  if (!memory) {
    memory = std::make_unique_for_overwrite<uint64_t[]>(static_cast<size_t>(t.rows() * t.row_bytes() / 8 + 1));
    contents_->copy_rows(name, 0, t.rows(), reinterpret_cast<char*>(memory.get()));
  }
  Tensor out(memory.get(), {1}, t.dtype);
  out.rank = static_cast<int>(t.shape.size());
  std::copy(t.shape.begin(), t.shape.end(), out.shape.begin());
  out.ld = out.cols();
  return out;
}

void LoadedCheckpoint::read_rows(const std::string& name, int64_t first, Tensor out) const {
  const Manifest::Tensor& t = contents_->at(name);
  const int64_t rows = out.dim(0);
  KESTREL_CHECK(out.device == Device::cpu && out.contiguous() && out.dtype == t.dtype &&
                    out.bytes() == rows * t.row_bytes() && first >= 0 && first + rows <= t.rows(),
                "rows ", first, "+", rows, " of checkpoint tensor ", name, " with ", t.rows(), " rows of ",
                t.row_bytes(), " bytes into ", out.describe());
  contents_->copy_rows(name, first, rows, static_cast<char*>(out.data));
}

std::string list_of(const std::vector<RejectedCheckpoint>& rejected) {
  std::string list;
  for (const RejectedCheckpoint& r : rejected) list += "\n  " + r.why;
  return list;
}

std::optional<LoadedCheckpoint> find_checkpoint(const std::string& root, std::vector<RejectedCheckpoint>* rejected) {
  for (const CheckpointFolder& folder : list_checkpoints(root)) {
    std::string why = folder.damage;
    try {
      if (why.empty()) return open_checkpoint(folder.path);
    } catch (const DataError& e) {
      why = e.what();
    }
    if (rejected) rejected->push_back({folder.path, why});
  }
  return std::nullopt;
}

bool has_checkpoints(const std::string& root) {
  return !list_checkpoints(root).empty();
}

std::string set_aside(const std::string& dir) {
  std::string aside = dir + ".damaged";
  std::error_code ec;
  for (int n = 2; std::filesystem::exists(aside, ec); ++n) aside = text(dir, ".damaged.", n);
  std::filesystem::rename(dir, aside, ec);
  if (ec) {
    throw DataError(text("cannot rename the damaged checkpoint ", dir, " to ", aside, ": ", ec.message(),
                         ". Move it away by hand, or make its folder writable."));
  }
  return aside;
}

}  // namespace kestrel
