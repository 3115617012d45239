#include "src/data/dataset.h"

#include <algorithm>

#include "kernels/core/error.h"
#include "src/checkpoint/hash.h"
#include "src/data/files.h"
#include "src/data/tokenizer.h"

namespace kestrel {
namespace {

void check_ids(const Shard& shard, const Shard::Scan& scan, int64_t vocab_size) {
  const bool own = shard.vocab_size() >= 0;
  if (own && shard.vocab_size() > vocab_size) {
    throw DataError(text(shard.path(), " has a vocabulary of ", shard.vocab_size(), ", the model's vocab_size is ",
                         vocab_size, ". Set model.vocab_size to at least ", shard.vocab_size(), "."));
  }
  const int64_t limit = own ? shard.vocab_size() : vocab_size;
  if (scan.max_id >= limit) {
    throw DataError(text(shard.path(), ": token ", scan.max_position, " is id ", scan.max_id,
                         ", outside the vocabulary of ", limit, own ? " in its header" : " of the model",
                         ". The file is damaged or belongs to another vocabulary."));
  }
}

}  // namespace

TokenDataset::TokenDataset(const std::vector<std::string>& files_or_globs, int64_t sequence_length, int64_t vocab_size,
                           const std::string& tokenizer_fingerprint)
    : sequence_length_(sequence_length), tokenizer_(tokenizer_fingerprint) {
  if (sequence_length < 1) throw ConfigError(text("data.sequence_length ", sequence_length, " is below 1"));
  if (vocab_size < 1) throw ConfigError(text("vocab_size ", vocab_size, " is below 1"));
  const auto files = expand_globs(files_or_globs);
  if (files.empty()) throw DataError("the list of data files is empty. Name at least one shard in the data section.");
  row_begin_ = {0};
  Xxh64 identity;
  for (const auto& file : files) {
    Shard shard(file);
    check_same_tokenizer(shard.path(), shard.tokenizer(), "the tokenizer it is used with", tokenizer_);
    if (tokenizer_.empty()) tokenizer_ = shard.tokenizer();
    if (shard.size() < sequence_length + 1) {
      throw DataError(text(file, " has ", shard.size(), " tokens, shorter than one row of ", sequence_length + 1,
                           " (data.sequence_length + 1). Join it with another shard or shorten the sequence."));
    }
    const Shard::Scan scan = shard.scan();
    check_ids(shard, scan, vocab_size);
    const uint64_t facts[] = {scan.hash, static_cast<uint64_t>(shard.size())};
    identity.update(facts, sizeof facts);
    tokens_ += shard.size();
    bytes_ = bytes_ < 0 || shard.text_bytes() < 0 ? -1 : bytes_ + shard.text_bytes();
    knows_documents_ = knows_documents_ && (shard.has_document_starts() || shard.eos_id() >= 0);
    row_begin_.push_back(row_begin_.back() + (shard.size() - 1) / sequence_length);
    shards_.push_back(std::move(shard));
  }
  fingerprint_ = hex(identity.digest());
  const auto& table = shards_.front().token_bytes();
  const bool shared =
      std::all_of(shards_.begin(), shards_.end(), [&](const Shard& s) { return s.token_bytes() == table; });
  if (shared && !table.empty()) {
    token_bytes_ = table;
    token_bytes_.resize(static_cast<size_t>(vocab_size), 0);
  }
}

void TokenDataset::read_row(int64_t row, int32_t* tokens, int32_t* targets, int32_t* segment) const {
  KESTREL_CHECK(row >= 0 && row < rows(), "row ", row, " of ", rows());
  const auto after = std::upper_bound(row_begin_.begin(), row_begin_.end(), row);
  const auto s = static_cast<size_t>(after - row_begin_.begin() - 1);
  const Shard& shard = shards_[s];
  const int64_t T = sequence_length_, begin = (row - row_begin_[s]) * T;
  shard.read(begin, T, tokens);
  shard.read(begin + 1, T, targets);
  if (!segment) return;
  const auto& starts = shard.document_starts();
  auto next = std::upper_bound(starts.begin(), starts.end(), begin);
  int32_t document = 0;
  for (int64_t t = 0; t < T; ++t) {
    if (shard.has_document_starts()) {
      if (next != starts.end() && *next == begin + t) ++document, ++next;
    } else if (t > 0 && shard.eos_id() >= 0 && tokens[t - 1] == shard.eos_id()) {
      ++document;
    }
    segment[t] = document;
  }
}

}  // namespace kestrel
