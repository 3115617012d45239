// What a checkpoint says beside its tensors: enough to go on exactly where the run stopped, and to refuse another
// run's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/config/run_config.h"

namespace kestrel {

struct TrainState {
  int64_t step = 0;     // steps done, skipped ones included: the next step has this 0-based index
  int64_t updates = 0;  // updates applied (AdamW's bias correction)
  int64_t tokens = 0;   // tokens seen
  int64_t skipped = 0;  // steps whose update was not applied
  int64_t skipped_in_a_row = 0;
  // Identity of the run.  The schedule, the logging and the number of steps may change between runs; these may not.
  std::string model_hash;
  std::string model_json;
  std::string data_fingerprint;
  int64_t sequence_length = 0, global_batch_size = 0, data_seed = 0;
  bool shuffle = true;
  std::string optimizer_type;
  std::string tokenizer;    // fingerprint of the one that made the data, "" when not known
  std::string config_json;  // the whole resolved config of the saving run, for the reader

  std::string to_json() const;
  static TrainState from_json(const std::string& json, const std::string& where);  // DataError
};

// Throws when a checkpoint's state cannot be continued by this run: another model (DataError, names the differing
// fields), other data or another sampler (DataError), or a step beyond the run's end (ConfigError).
void check_resumable(const TrainState& saved, const TrainState& run, int64_t total_steps,
                     const std::string& checkpoint);

// What of the run file differs all the same, a line each: "train.seed: 1 -> 2".
std::vector<std::string> changed_fields(const TrainState& saved, const TrainState& run);

}  // namespace kestrel
