// Learns the merges of a byte-level BPE tokenizer.
//
//   BpeTrainer trainer({.vocab_size = 4096});
//   trainer.add(documents);            // as often as wanted; counts pieces, on all threads
//   Tokenizer t = trainer.train();
//
// Ids: bytes 0 to 255, then merges in the order learned, then the special tokens.  Each round merges the most frequent
// adjacent pair (ties: the smaller left id, then the smaller right id), until the vocabulary is full or no pair occurs
// `min_count` times; then the vocabulary is smaller than asked for.  The result depends on the text alone, not on how
// it was batched or on the number of threads.
//
// Pair counts are kept up to date at the places a merge touches, and the best pair comes from a heap whose stale
// entries are corrected when they surface: total work is linear in the merged positions, with a log factor for the
// heap.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/data/string_map.h"
#include "src/data/tokenizer.h"

namespace kestrel {

inline constexpr int64_t kMaxVocabSize = int64_t{1} << 24;

struct BpeOptions {
  int64_t vocab_size = 8192;  // specials included; >= 256 + specials, <= kMaxVocabSize
  SplitPattern pattern = SplitPattern::cl100k;
  std::vector<std::string> specials = {std::string(kEndOfText)};
  int64_t min_count = 2;
};

class BpeTrainer {
 public:
  explicit BpeTrainer(BpeOptions options);  // ConfigError on options out of range
  // Documents are independent: no piece spans two of them.
  void add(std::span<const std::string> documents);
  int64_t distinct_pieces() const { return static_cast<int64_t>(counts_.size()); }
  // DataError if no text was added.
  Tokenizer train() const;

 private:
  BpeOptions options_;
  StringMap<int64_t> counts_;  // piece -> occurrences
};

}  // namespace kestrel
