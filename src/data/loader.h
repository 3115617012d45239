// Micro-batches of a training (or validation) run, prepared one ahead by a thread of its own.
//
//   TokenDataset data(files, T, vocab_size, tokenizer.fingerprint());
//   const MicroRange mine{.first = rank * n, .count = n};
//   BatchLoader loader(data, {.global_batch_size = G, .shuffle = true, .seed = seed}, B, mine);
//   for step: for m in [mine.first, mine.first + mine.count): const Batch& b = loader.fetch(step, m);
//
// fetch is stateless: (step, micro) alone decides what comes back, so a resume needs no position but the step.  Asked
// in order, each batch is ready before it is asked for.  Past the last row the next epoch begins.
//
// Validation in file order: shuffle = false, G = B * batches, step 0.  To evaluate every row once, including a last
// batch that is not full, use read_rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/data/dataset.h"
#include "src/data/sampler.h"

namespace kestrel {

// Row-major [rows, T]; feed them to Tensor::of(batch.tokens.data(), {rows, T}).
struct Batch {
  int64_t rows = 0;
  int64_t sequence_length = 0;
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;  // -100: not a target (only in rows past the end, see read_rows)
  std::vector<int32_t> segment;  // document of each token, numbered from 0 within its row; never decreasing
};

// Rows [first_row, first_row + rows) of the data set in file order; rows past its end have tokens 0 and targets -100.
void read_rows(const TokenDataset& data, int64_t first_row, int64_t rows, Batch& out);

// The micro-batches of a step that this rank takes: [first, first + count).
struct MicroRange {
  int64_t first = 0;
  int64_t count = 1;
};

class BatchLoader {
 public:
  // micro_batch_size: B; G must be a multiple of it, and `mine` must lie within [0, G / B).  ConfigError otherwise.
  // `data` must outlive the loader.
  BatchLoader(const TokenDataset& data, const SamplerParams& params, int64_t micro_batch_size, MicroRange mine = {},
              bool prefetch = true);
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  // Micro-batch `micro` of step `step` (both 0-based; any micro in [0, G / B), mine or not).  The reference stays valid
  // until the next fetch.
  const Batch& fetch(int64_t step, int64_t micro);

  const RowSampler& sampler() const;

 private:
  class Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace kestrel
