#include "src/data/shard_series.h"

#include <cstdio>
#include <filesystem>
#include <utility>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

std::string temporary(const std::string& name) {
  return name + ".partial";
}

void join(ShardContents& a, const ShardContents& b) {
  const auto shift = static_cast<int64_t>(a.tokens.size());
  for (int64_t d : b.document_starts) a.document_starts.push_back(d + shift);
  a.tokens.insert(a.tokens.end(), b.tokens.begin(), b.tokens.end());
  a.text_bytes += b.text_bytes;
}

}  // namespace

ShardSeries::ShardSeries(std::string path_prefix, int64_t shard_tokens, ShardContents like)
    : prefix_(std::move(path_prefix)), shard_tokens_(shard_tokens), like_(std::move(like)), current_(empty()) {}

ShardSeries::~ShardSeries() {
  std::error_code ignored;
  for (const auto& name : written_) std::filesystem::remove(temporary(name), ignored);
}

ShardContents ShardSeries::empty() const {
  ShardContents c = like_;
  c.text_bytes = 0;
  return c;
}

void ShardSeries::begin_document(int64_t tokens, int64_t bytes) {
  const auto have = static_cast<int64_t>(current_.tokens.size());
  if (have > 0 && have + tokens > shard_tokens_) {
    if (previous_) write(*previous_);
    previous_ = std::move(current_);
    current_ = empty();
  }
  current_.document_starts.push_back(static_cast<int64_t>(current_.tokens.size()));
  current_.text_bytes += bytes;
  bytes_ += bytes;
  tokens_ += tokens;
  ++documents_;
}

void ShardSeries::append(const std::vector<int32_t>& tokens) {
  current_.tokens.insert(current_.tokens.end(), tokens.begin(), tokens.end());
}

void ShardSeries::finish() {
  if (previous_ && static_cast<int64_t>(current_.tokens.size()) < shard_tokens_ / 4) {
    join(*previous_, current_);
    current_ = empty();
  }
  if (previous_) write(*previous_);
  previous_.reset();
  if (!current_.tokens.empty()) write(current_);
  current_ = empty();
}

void ShardSeries::write(const ShardContents& shard) {
  char number[32];
  std::snprintf(number, sizeof number, "-%05zu.safetensors", written_.size());
  const std::string name = prefix_ + number;
  write_shard(temporary(name), shard);
  written_.push_back(name);
}

std::vector<std::string> ShardSeries::publish() {
  for (const auto& name : written_) {
    std::error_code error;
    std::filesystem::rename(temporary(name), name, error);
    if (error) throw DataError(text("cannot rename ", temporary(name), " to ", name, ": ", error.message()));
  }
  return std::exchange(written_, {});
}

}  // namespace kestrel
