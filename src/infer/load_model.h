// A trained model from disk, for everything that does not train.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "src/data/tokenizer.h"
#include "src/model/model.h"

namespace kestrel {

struct InferenceModel {
  std::string source;  // what was opened, for messages
  int64_t step = -1;   // of a checkpoint
  ModelConfig config;
  std::optional<RunConfig> run;  // of a run directory or checkpoint
  std::string trained_with;      // fingerprint of the tokenizer that made the training data, "" when not known
  std::unique_ptr<Model> model;
  std::optional<Tokenizer> tokenizer;

  const Tokenizer& need_tokenizer() const;  // ConfigError without one
};

// `path`: a run directory (its newest good checkpoint), one checkpoint folder, or a directory with config.json (a model
// section) and model.safetensors.  `tokenizer` is used in place of the file named or found there; it must be the same
// tokenizer.  The weights go to `device`; in BF16 its working copies are rounded.  DataError when nothing fits.
InferenceModel load_model(const std::string& path, const std::optional<std::string>& tokenizer = {},
                          Device device = Device::cpu, DType working = DType::f32);

}  // namespace kestrel
