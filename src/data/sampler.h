// Which row of the data a training step sees.
//
// Rows of all epochs are numbered 0, 1, 2, ...: step s of global batch G sees the numbers s G ... s G + G - 1, and
// micro-batch m of B rows takes the m-th slice of B of them.  Number n belongs to epoch n / rows; inside an epoch a
// permutation says which row of the data set it is.
//
// The permutation is a keyed Feistel network over the smallest even-bit power of two >= rows, walked until it lands
// inside [0, rows) (cycle walking; at most 4 rounds of the network on average).  It is a pure function of (seed, epoch,
// number): no table, no state, so neither the number of ranks nor the micro-batch size nor a resume changes which rows
// a step sees.
#pragma once

#include <cstdint>

namespace kestrel {

// Bijection of [0, n) onto itself, n >= 1; index in [0, n).
int64_t permuted_index(int64_t index, int64_t n, uint64_t seed, uint64_t epoch);

struct SamplerParams {
  int64_t global_batch_size = 1;  // rows of one step, G
  bool shuffle = true;            // false: file order
  uint64_t seed = 0;
};

class RowSampler {
 public:
  RowSampler(int64_t dataset_rows, const SamplerParams& params);

  // The row of the data set that position `position` in [0, G) of step `step` (0-based) sees.
  int64_t row(int64_t step, int64_t position) const;
  // The epoch (0-based) that the first row of a step belongs to.
  int64_t epoch(int64_t step) const { return step * params_.global_batch_size / rows_; }
  int64_t global_batch_size() const { return params_.global_batch_size; }

 private:
  int64_t rows_;
  SamplerParams params_;
};

}  // namespace kestrel
