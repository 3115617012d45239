// A set of token shards seen as training rows.
//
// Row r of a shard of N tokens reads tokens [r T, r T + T] (T + 1 of them): tokens = the first T, targets = the last T.
// A shard has (N - 1) / T rows; rows of the set are numbered through the shards in the order given (a glob's files
// sorted by name).  No row crosses a shard.
//
// Opening checks everything once: every header against its file, every id against the vocabulary, every shard against
// the others and against the tokenizer.  Errors are DataErrors that name the file, the value, the limit and the way
// out.  Reading is then free of checks, thread safe and of constant cost (files are mapped).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/data/shard.h"

namespace kestrel {

class TokenDataset {
 public:
  // files_or_globs: paths, or patterns with * ? [ ].  sequence_length: T >= 1.  vocab_size: the model's; ids and each
  // shard's own vocab_size must not exceed it.  tokenizer_fingerprint: "" or what shards must not contradict; "" is the
  // first one that a shard records.
  TokenDataset(const std::vector<std::string>& files_or_globs, int64_t sequence_length, int64_t vocab_size,
               const std::string& tokenizer_fingerprint = "");

  int64_t sequence_length() const { return sequence_length_; }
  int64_t rows() const { return row_begin_.back(); }
  int64_t tokens() const { return tokens_; }  // of all shards, tails that fill no row included
  // UTF-8 bytes of the text behind the shards, or -1 when a shard does not say.
  int64_t bytes() const { return bytes_; }
  // [vocab_size] bytes of text per token (special tokens 0), so that bits per byte over any set of targets is
  //   sum(loss in nats) / (ln 2 * sum(token_bytes[target])).
  // Empty when a shard does not carry the table (llm.c and Megatron files never do).
  const std::vector<int32_t>& token_bytes() const { return token_bytes_; }
  // Do the shards say where documents begin (document_starts, or an eos_id)?  If not, `segment` is 0 everywhere.
  bool knows_documents() const { return knows_documents_; }
  // Of the tokenizer that made the shards, "" when neither they nor the caller know it.
  const std::string& tokenizer() const { return tokenizer_; }
  // 16 hex digits over every token and the order of the shards: a resumed run compares it with the run that was saved.
  const std::string& fingerprint() const { return fingerprint_; }
  const std::vector<Shard>& shards() const { return shards_; }

  // Row `row` in [0, rows()): tokens [T], targets [T], segment [T] (0-based number of the token's document within this
  // row; may be null).
  void read_row(int64_t row, int32_t* tokens, int32_t* targets, int32_t* segment) const;

 private:
  int64_t sequence_length_;
  int64_t tokens_ = 0;
  int64_t bytes_ = 0;
  bool knows_documents_ = true;
  std::string tokenizer_, fingerprint_;
  std::vector<Shard> shards_;
  std::vector<int64_t> row_begin_;  // [shards + 1]
  std::vector<int32_t> token_bytes_;
};

}  // namespace kestrel
