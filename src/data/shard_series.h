// prefix-00000.safetensors, prefix-00001.safetensors, ...: a stream of documents cut into shards.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/data/shard.h"

namespace kestrel {

class ShardSeries {
 public:
  // `like` carries what all shards have in common (vocabulary, tokenizer, eos_id, token_bytes).
  ShardSeries(std::string path_prefix, int64_t shard_tokens, ShardContents like);
  ~ShardSeries();  // removes what was written and not published
  ShardSeries(const ShardSeries&) = delete;
  ShardSeries& operator=(const ShardSeries&) = delete;

  void begin_document(int64_t tokens, int64_t bytes);  // what its append calls will add up to
  void append(const std::vector<int32_t>& tokens);
  // Writes the rest.  A last shard under a quarter of the size is joined to the one before it, so that no shard is too
  // short for a row.
  void finish();
  // Gives all shards their names, which are returned.
  std::vector<std::string> publish();

  int64_t tokens() const { return tokens_; }
  int64_t bytes() const { return bytes_; }
  int64_t documents() const { return documents_; }

 private:
  ShardContents empty() const;
  void write(const ShardContents& shard);

  std::string prefix_;
  int64_t shard_tokens_;
  ShardContents like_, current_;
  std::optional<ShardContents> previous_;  // full, not yet written
  std::vector<std::string> written_;       // final names of the files that lie under temporary ones
  int64_t tokens_ = 0, bytes_ = 0, documents_ = 0;
};

}  // namespace kestrel
