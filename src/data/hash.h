// A fast 64-bit hash for tables in memory.  What is written to files is hashed by XXH64 (src/checkpoint/hash.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace kestrel {

// A bijection of 64-bit words in which every input bit reaches every output bit (two multiply-xorshift rounds).
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return x;
}

// Little-endian words of 8 bytes, then the rest padded with zeros, then the length.
inline uint64_t hash_bytes(const void* data, size_t n, uint64_t seed = 0) {
  const char* p = static_cast<const char*>(data);
  uint64_t h = seed + 0x9e3779b97f4a7c15ull, word = 0;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    std::memcpy(&word, p + i, 8);
    h = (h ^ word) * 0xd6e8feb86659fd93ull;
    h ^= h >> 29;
  }
  if (i < n) {
    word = 0;
    std::memcpy(&word, p + i, n - i);
    h = (h ^ word) * 0xd6e8feb86659fd93ull;
    h ^= h >> 29;
  }
  return mix64(h ^ n);
}

}  // namespace kestrel
