#include "src/data/sampler.h"

#include <bit>

#include "kernels/core/error.h"
#include "src/data/hash.h"

namespace kestrel {
namespace {

constexpr int kRounds = 8;

// A bijection of [0, 2^(2 half)): (left, right) -> (right, left ^ F(right)), kRounds times.
uint64_t feistel(uint64_t x, int half, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t left = x >> half, right = x & mask;
  for (int r = 0; r < kRounds; ++r) {
    const uint64_t f = mix64(right ^ mix64(key + static_cast<uint64_t>(r))) & mask;
    const uint64_t next = left ^ f;
    left = right;
    right = next;
  }
  return left << half | right;
}

}  // namespace

int64_t permuted_index(int64_t index, int64_t n, uint64_t seed, uint64_t epoch) {
  KESTREL_CHECK(n >= 1 && index >= 0 && index < n, "index ", index, " of ", n);
  const auto size = static_cast<uint64_t>(n);
  const int bits = std::bit_width(size - 1);
  const int half = bits <= 2 ? 1 : (bits + 1) / 2;
  const uint64_t key = mix64(mix64(seed + 0x9e3779b97f4a7c15ull) ^ (epoch * 0xd1342543de82ef95ull + 1));
  uint64_t x = static_cast<uint64_t>(index);
  do {
    x = feistel(x, half, key);
  } while (x >= size);
  return static_cast<int64_t>(x);
}

RowSampler::RowSampler(int64_t dataset_rows, const SamplerParams& params) : rows_(dataset_rows), params_(params) {
  KESTREL_CHECK(dataset_rows >= 1, "a sampler over ", dataset_rows, " rows");
  if (params.global_batch_size < 1) {
    throw ConfigError(text("global batch size ", params.global_batch_size, " is below 1"));
  }
}

int64_t RowSampler::row(int64_t step, int64_t position) const {
  KESTREL_CHECK(step >= 0 && position >= 0 && position < params_.global_batch_size, "position ", position, " of step ",
                step, ", global batch ", params_.global_batch_size);
  const int64_t number = step * params_.global_batch_size + position;
  const int64_t index = number % rows_;
  return params_.shuffle ? permuted_index(index, rows_, params_.seed, static_cast<uint64_t>(number / rows_)) : index;
}

}  // namespace kestrel
