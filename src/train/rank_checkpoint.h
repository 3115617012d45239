// One checkpoint written by all ranks together: each writes the parts it has, under the names and shapes of whole
// tensors, so that any other number of ranks can read it.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "kernels/core/stream.h"
#include "src/checkpoint/checkpoint.h"
#include "src/parallel/communicator.h"

namespace kestrel {

// Parts of named tensors in host memory: views where they lie there already, copies of a device's otherwise.
class HostParts {
 public:
  // Rows [first_row, first_row + t.rows()) of a tensor of this shape; a shape of one dimension is one row.
  void add(Stream& s, const std::string& name, const std::vector<int64_t>& shape, int64_t first_row, Tensor t);
  const std::vector<TensorPart>& list() const { return list_; }

 private:
  std::vector<TensorPart> list_;
  std::deque<std::vector<char>> copies_;
};

// Collective: save_checkpoint by all ranks.  If one of them fails, nothing is saved and all throw the same DataError.
void save_checkpoint(Communicator& ranks, const std::string& root, int64_t step, const HostParts& parts,
                     const std::string& train_state_json, const CheckpointPolicy& policy);

// Copies the same rows out of a checkpoint into `t`.  DataError when the tensor is missing there, is of another type or
// shape, or holds a value that is not finite.  On a planner everything is read and checked, and nothing kept.
void read_part(Stream& s, const LoadedCheckpoint& checkpoint, const std::string& name,
               const std::vector<int64_t>& shape, int64_t first_row, Tensor t);

}  // namespace kestrel
