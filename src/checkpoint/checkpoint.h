// Checkpoints that survive a crash at any moment, and reading them back at any world size.
//
//   root/latest                                   text: the folder's name and a newline
//   root/step_00000100/shard-00000-00000.safetensors ...
//   root/step_00000100/train_state.json           the trainer's own, any JSON value
//   root/step_00000100/manifest.json              sizes and checksums of all files, where every tensor lies
//
// Saving: everything is written under root/.tmp-step_..., synced, renamed into place, the root synced; `latest` moves
// last; then old checkpoints are rotated out.  A crash leaves either the old set or the old set and the new one, never
// a half checkpoint under a final name; leftovers (.tmp-*) go with the next save.
//
// The manifest (format 1):
//   {"format": 1, "step": 100, "sequence": 7,
//    "files":   {"train_state.json": {"bytes": 51, "xxh64": "0123456789abcdef"}, ...},
//    "tensors": {"model.norm.weight": {"dtype": "F32", "shape": [64],
//                                      "parts": [{"file": "shard-00000-00000.safetensors", "first": 0, "rows": 64}]}}}
// `shape` is global; a part holds rows [first, first + rows) of the first dimension, so several ranks may each write
// theirs.  `xxh64` is what `xxhsum -H1` prints.  `sequence` counts the saves of this root: the newest checkpoint is the
// one saved last, whatever its step (a run started over in the same folder has smaller steps than what lies there).
//
// All errors are DataErrors with the path, the system's reason and the way out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/checkpoint/safetensors.h"

namespace kestrel {

struct CheckpointPolicy {
  int64_t keep = 3;                     // the newest this many stay; 0 = all stay
  int64_t keep_every = 0;               // steps divisible by this stay for good; 0 = none
  int64_t shard_bytes = 5'000'000'000;  // a shard file holds at most this (a larger tensor is split by rows)
};

// Saves one checkpoint of whole tensors from one process.  `train_state_json` must be JSON.  If anything fails the
// partial folder is removed, the checkpoints before it and `latest` are as they were, and DataError is thrown (a
// failure to remove an old checkpoint at the end is reported the same way, and says that the new one is in place).
// Saving a step that exists replaces it.
void save_checkpoint(const std::string& root, int64_t step, const std::vector<NamedTensor>& tensors,
                     const std::string& train_state_json, const CheckpointPolicy& keep);

// The same in pieces, for several ranks that write into one folder:
//   rank 0: dir = begin_checkpoint(root, step);    barrier
//   all:    write_checkpoint_shards(dir, rank, parts, shard_bytes);    barrier
//   rank 0: commit_checkpoint(root, step, dir, train_state_json, keep);
// Any rank failed: rank 0 calls abandon_checkpoint(dir) instead.  The commit checks that the parts cover every tensor.
struct TensorPart {
  std::string name;
  Tensor tensor;                        // rows [first, first + tensor.dim(0)) of the global tensor; host, contiguous
  std::vector<int64_t> global_shape{};  // empty: the tensor is whole
  int64_t first = 0;
};
std::string begin_checkpoint(const std::string& root, int64_t step);
void write_checkpoint_shards(const std::string& dir, int rank, const std::vector<TensorPart>& parts,
                             int64_t shard_bytes = CheckpointPolicy{}.shard_bytes);
void commit_checkpoint(const std::string& root, int64_t step, const std::string& dir,
                       const std::string& train_state_json, const CheckpointPolicy& keep);
void abandon_checkpoint(const std::string& dir) noexcept;
// The DataError of a save that failed for this reason.
[[noreturn]] void checkpoint_not_saved(const std::string& root, int64_t step, const std::string& why);

// A verified checkpoint, open for reading.  Copies share the mapped files; a Tensor stays valid while any copy lives.
class LoadedCheckpoint {
 public:
  std::string dir;
  int64_t step = 0;
  std::string train_state_json;

  bool has(const std::string& name) const;
  std::vector<std::string> names() const;                     // sorted
  std::vector<int64_t> shape(const std::string& name) const;  // global; DataError when missing, with the nearest name
  DType dtype(const std::string& name) const;
  // The whole tensor, read only: a view into the file, or assembled in memory when it lies in several parts.
  Tensor tensor(const std::string& name) const;
  // Copies rows [first, first + out.dim(0)) of the first dimension into `out` (same dtype and row size, contiguous).
  void read_rows(const std::string& name, int64_t first, Tensor out) const;

 private:
  friend LoadedCheckpoint open_checkpoint(const std::string& dir, bool verify);
  struct Contents;
  std::shared_ptr<Contents> contents_;
};

// Opens the named folder after checking every file's size and checksum and every tensor's coverage; DataError says what
// is wrong with it.  `verify` false leaves the files' sizes and checksums to another rank that has read them.
LoadedCheckpoint open_checkpoint(const std::string& dir, bool verify = true);

// A folder that did not verify.
struct RejectedCheckpoint {
  std::string dir, why;  // `why` names the folder too
};
// "\n  why" of each.
std::string list_of(const std::vector<RejectedCheckpoint>& rejected);

// The newest checkpoint under root that verifies, or nothing.  `rejected` (may be null) receives an entry for every
// newer one that did not, with the reason.  A root that does not exist is an empty one.
std::optional<LoadedCheckpoint> find_checkpoint(const std::string& root, std::vector<RejectedCheckpoint>* rejected);

// Whether there are any under root, good or not.
bool has_checkpoints(const std::string& root);

// Renames a rejected folder to NAME.damaged (NAME.damaged.2, ...): no save replaces it, no rotation removes it. Returns
// its new path.
std::string set_aside(const std::string& dir);

}  // namespace kestrel
