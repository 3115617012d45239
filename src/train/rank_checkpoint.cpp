#include "src/train/rank_checkpoint.h"

#include <functional>
#include <numeric>
#include <system_error>

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "src/model/weights.h"

namespace kestrel {
namespace {

// Everybody's reason for failing, "" where there is none; the first as one text.
std::string first_failure(Communicator& ranks, const std::string& mine) {
  const std::vector<std::string> all = ranks.gather(mine);
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) return all.size() == 1 ? all[r] : text("rank ", r, ": ", all[r]);
  }
  return {};
}

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const DataError& e) {
    return e.what();
  } catch (const std::system_error& e) {
    return text(e.what(), ".");
  }
  return {};
}

}  // namespace

void HostParts::add(Stream& s, const std::string& name, const std::vector<int64_t>& shape, int64_t first_row,
                    Tensor t) {
  const Tensor host = t.device == Device::cpu ? t : on_host(s, t, copies_.emplace_back());
  list_.push_back({name, host, shape, first_row});
}

void save_checkpoint(Communicator& ranks, const std::string& root, int64_t step, const HostParts& parts,
                     const std::string& train_state_json, const CheckpointPolicy& policy) {
  std::string dir, why;
  if (ranks.is_root()) why = failure_of([&] { dir = begin_checkpoint(root, step); });
  why = first_failure(ranks, why);
  if (!why.empty()) throw DataError(why);
  dir = ranks.gather(dir)[0];
  why = first_failure(
      ranks, failure_of([&] { write_checkpoint_shards(dir, ranks.rank(), parts.list(), policy.shard_bytes); }));
  if (!why.empty()) {
    if (ranks.is_root()) abandon_checkpoint(dir);
    checkpoint_not_saved(root, step, why);
  }
  if (ranks.is_root()) why = failure_of([&] { commit_checkpoint(root, step, dir, train_state_json, policy); });
  why = first_failure(ranks, why);
  if (!why.empty()) throw DataError(why);
}

void read_part(Stream& s, const LoadedCheckpoint& checkpoint, const std::string& name,
               const std::vector<int64_t>& shape, int64_t first_row, Tensor t) {
  if (checkpoint.dtype(name) != t.dtype || checkpoint.shape(name) != shape) {
    throw DataError(text(checkpoint.dir, ": tensor \"", name, "\" is ", checkpoint.tensor(name).describe(),
                         ", expected ", t.describe(), ". Use the run file it was made with."));
  }
  std::vector<char> memory;
  Tensor host = t;
  const bool staged = t.device != Device::cpu || s.planning();  // a planner's memory must not be touched
  if (staged) {
    memory.resize(static_cast<size_t>(t.bytes()));
    host.data = memory.data();
    host.device = Device::cpu;
  }
  // As the file counts rows: a vector's are its elements.
  const int64_t row = std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
  checkpoint.read_rows(name, first_row, host.view({host.numel() / row, row}));
  check_finite(checkpoint.dir, name, host);
  if (!staged) return;
  upload(s, t, host);
  wait(s);
}

}  // namespace kestrel
