// Saving checkpoints; opening them is checkpoint.cpp.
#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/files.h"
#include "src/checkpoint/manifest.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;

std::string in(const std::string& dir, const std::string& name) {
  return (fs::path(dir) / name).string();
}

void remove_leftovers(const std::string& root) {
  std::vector<fs::path> leftovers;
  for (const auto& e : fs::directory_iterator(root)) {
    if (e.path().filename().string().starts_with(kTemporaryPrefix)) leftovers.push_back(e.path());
  }
  for (const auto& p : leftovers) fs::remove_all(p);
}

// Shards under construction: tensors gather until the next would pass the limit, then the file is written.
class ShardWriter {
 public:
  ShardWriter(const std::string& dir, int rank, int64_t limit) : dir_(dir), rank_(rank), limit_(limit) {}

  // Rows [first, first + tensor rows) of a tensor of shape `global`.
  void add(const std::string& name, const Tensor& tensor, const std::vector<int64_t>& global, int64_t first) {
    if (!waiting_.empty() && (bytes_ + tensor.bytes() > limit_ || names_.count(name))) flush();
    NamedTensor nt{name, tensor, global};
    nt.shape[0] = tensor.dim(0);
    if (nt.shape != global) metadata_[part_key(name)] = part_record(global, first);
    bytes_ += tensor.bytes();
    names_.insert(name);
    waiting_.push_back(std::move(nt));
  }

  void flush() {
    if (waiting_.empty()) return;
    char name[64];
    std::snprintf(name, sizeof name, "shard-%05d-%05d.safetensors", rank_, index_++);
    write_safetensors(in(dir_, name), waiting_, metadata_);
    waiting_.clear();
    metadata_.clear();
    names_.clear();
    bytes_ = 0;
  }

 private:
  std::string dir_;
  int rank_;
  int64_t limit_;
  int index_ = 0;
  int64_t bytes_ = 0;
  std::vector<NamedTensor> waiting_;
  std::set<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

// The part as a matrix [rows, elements of a row], whatever its shape: rows are what parts are counted in.
Tensor as_rows(const TensorPart& p, const std::vector<int64_t>& global) {
  KESTREL_CHECK(p.tensor && p.tensor.contiguous() && p.tensor.device == Device::cpu, p.name, " is ",
                p.tensor.describe(), ", cannot be written");
  int64_t row = 1;
  for (size_t i = 1; i < global.size(); ++i) row *= global[i];
  const int64_t rows = row > 0 ? p.tensor.numel() / row : p.tensor.dim(0);
  KESTREL_CHECK(rows * row == p.tensor.numel() && p.first >= 0 && p.first + rows <= global[0], p.name, ": ",
                p.tensor.describe(), " at row ", p.first, " is no part of a tensor of ", global[0], " rows of ", row);
  return Tensor(p.tensor.data, {rows, row}, p.tensor.dtype);
}

void add_part(ShardWriter& shards, const TensorPart& p, int64_t limit) {
  std::vector<int64_t> global = p.global_shape;
  if (global.empty()) global.assign(p.tensor.shape.begin(), p.tensor.shape.begin() + p.tensor.rank);
  const Tensor m = as_rows(p, global);
  const int64_t row_bytes = m.cols() * size_of(m.dtype);
  const int64_t step = row_bytes == 0 ? std::max<int64_t>(m.rows(), 1) : std::max<int64_t>(limit / row_bytes, 1);
  int64_t r = 0;
  do {
    const int64_t n = std::min(step, m.rows() - r);
    shards.add(p.name, m.slice(r, n), global, p.first + r);
    r += n;
  } while (r < m.rows());
}

// Puts `from` at `to`; what lay at `to` is then at `from`, to be removed.
void exchange_into_place(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EEXIST) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  }
  // A file system without these flags: two renames; a crash in between loses `to`, and no other checkpoint.
  if (errno == EINVAL || errno == ENOSYS) {
    const std::string old = from + "-replaced";
    const bool existed = ::rename(to.c_str(), old.c_str()) == 0;
    if (::rename(from.c_str(), to.c_str()) == 0) {
      if (existed) fs::remove_all(old);
      return;
    }
  }
  throw DataError(text("cannot rename ", from, " to ", to, ": ", std::strerror(errno)));
}

// Removing takes time: under the temporary name a crash in the middle leaves no half checkpoint.
void remove_checkpoint(const std::string& root, const CheckpointFolder& f) {
  const std::string doomed = in(root, text(kTemporaryPrefix, "old-", f.name));
  fs::rename(f.path, doomed);
  fs::remove_all(doomed);
}

void rotate(const std::string& root, const CheckpointPolicy& policy) {
  if (policy.keep <= 0) return;
  int64_t newer = 0;
  for (const CheckpointFolder& f : list_checkpoints(root)) {
    if (!f.damage.empty()) continue;  // never removes what it cannot read
    const bool for_good = policy.keep_every > 0 && f.step % policy.keep_every == 0;
    if (newer++ >= policy.keep && !for_good) remove_checkpoint(root, f);
  }
}

void publish(const std::string& root, int64_t step, const std::string& dir, const std::string& train_state_json) {
  write_file(in(dir, kTrainStateFile), train_state_json);
  Manifest m = describe_folder(dir, step);
  check_coverage(dir, m);
  for (const CheckpointFolder& f : list_checkpoints(root)) m.sequence = std::max(m.sequence, f.sequence);
  ++m.sequence;
  write_manifest(dir, m);
  sync_directory(dir);
  const std::string name = folder_name(step);
  // Everything that needs space is written before anything is moved.
  AtomicFile latest(in(root, kLatestFile));
  const std::string line = name + "\n";
  latest.write(line.data(), static_cast<int64_t>(line.size()));
  exchange_into_place(dir, in(root, name));
  sync_directory(root);
  latest.commit();
  fs::remove_all(dir);  // the replaced checkpoint of this step, if there was one
}

// Errors of std::filesystem are system errors: their text has the path and the reason.
template <class F>
void guarded(const std::string& root, int64_t step, const std::string& dir, F&& fn) {
  try {
    fn();
  } catch (const DataError& e) {
    abandon_checkpoint(dir);
    checkpoint_not_saved(root, step, e.what());
  } catch (const std::system_error& e) {
    abandon_checkpoint(dir);
    checkpoint_not_saved(root, step, text(e.what(), "."));
  } catch (...) {
    abandon_checkpoint(dir);
    throw;
  }
}

}  // namespace

void checkpoint_not_saved(const std::string& root, int64_t step, const std::string& why) {
  throw DataError(
      text("the checkpoint of step ", step, " was not saved: ", why, " What was under ", root,
           " before is untouched. If the disk is full or read only, make room or set checkpoint.dir elsewhere."));
}

std::string begin_checkpoint(const std::string& root, int64_t step) {
  KESTREL_CHECK(step >= 0, "step ", step);
  const std::string dir = in(root, text(kTemporaryPrefix, folder_name(step)));
  guarded(root, step, {}, [&] {
    fs::create_directories(root);
    remove_leftovers(root);
    fs::create_directory(dir);
  });
  return dir;
}

void write_checkpoint_shards(const std::string& dir, int rank, const std::vector<TensorPart>& parts,
                             int64_t shard_bytes) {
  KESTREL_CHECK(shard_bytes > 0, "shard_bytes ", shard_bytes);
  ShardWriter shards(dir, rank, shard_bytes);
  for (const TensorPart& p : parts) add_part(shards, p, shard_bytes);
  shards.flush();
}

void commit_checkpoint(const std::string& root, int64_t step, const std::string& dir,
                       const std::string& train_state_json, const CheckpointPolicy& keep) {
  KESTREL_CHECK(nlohmann::json::accept(train_state_json), "train_state is not JSON: ", train_state_json.substr(0, 80));
  guarded(root, step, dir, [&] { publish(root, step, dir, train_state_json); });
  try {
    rotate(root, keep);
  } catch (const std::system_error& e) {
    throw DataError(text("the checkpoint of step ", step, " is saved, but an older one cannot be removed: ", e.what(),
                         ". Remove it by hand, or set checkpoint.keep to 0."));
  }
}

void abandon_checkpoint(const std::string& dir) noexcept {
  std::error_code ec;
  if (!dir.empty()) fs::remove_all(dir, ec);
}

void save_checkpoint(const std::string& root, int64_t step, const std::vector<NamedTensor>& tensors,
                     const std::string& train_state_json, const CheckpointPolicy& keep) {
  std::vector<TensorPart> parts;
  for (const NamedTensor& t : tensors) {
    int64_t elements = t.shape.empty() ? t.tensor.numel() : 1;
    for (int64_t d : t.shape) elements *= d;
    KESTREL_CHECK(elements == t.tensor.numel(), t.name, " is ", t.tensor.describe(), ", its shape to record has ",
                  elements, " elements");
    parts.push_back({t.name, t.tensor, t.shape, 0});
  }
  const std::string dir = begin_checkpoint(root, step);
  guarded(root, step, dir, [&] { write_checkpoint_shards(dir, 0, parts, keep.shard_bytes); });
  commit_checkpoint(root, step, dir, train_state_json, keep);
}

}  // namespace kestrel
