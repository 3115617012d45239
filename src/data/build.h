// Text -> token shards: `kestrel data build`.
//
// Each document is encoded (special tokens typed in it stay text) and followed by the end-of-text token.  A document is
// never split between shards.  Shards are train-00000.safetensors ... and validation-00000.safetensors ...; which
// documents are held out depends on the number of the document and the seed alone.  Everything is written under
// temporary names and renamed when all of it is there; an interrupted build leaves no shard behind under its own name.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/data/documents.h"
#include "src/data/tokenizer.h"

namespace kestrel {

struct BuildOptions {
  std::string out;                     // folder, made if missing
  double validation_fraction = 0;      // of the documents, in [0, 1)
  int64_t shard_tokens = 100'000'000;  // a shard is closed before it would exceed this (a longer document has its own)
  uint64_t seed = 0;
  InputOptions input;
  std::string eos = std::string(kEndOfText);
  std::string validation_text;  // file for the plain text held out, document after document ("": none)
  bool force = false;           // replace the shards of an earlier build
};

struct SplitReport {
  int64_t documents = 0, tokens = 0, bytes = 0;
  std::vector<std::string> files;
};

struct BuildReport {
  SplitReport train, validation;
  int64_t empty_documents = 0;  // without text, left out
};

struct BuildProgress {
  int64_t bytes_done, bytes_total;  // of the input as stored
  int64_t documents, tokens;
};

// Throws ConfigError on options out of range; DataError on unreadable input, existing shards without `force`, a
// tokenizer without the end-of-text token, or a split that leaves a side without documents.
BuildReport build_dataset(const Tokenizer& tokenizer, const std::vector<std::string>& inputs,
                          const BuildOptions& options, const std::function<void(const BuildProgress&)>& progress = {});

}  // namespace kestrel
