// XXH64, the 64-bit hash of the public xxHash specification, over a stream of bytes.  It finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kestrel {

class Xxh64 {
 public:
  explicit Xxh64(uint64_t seed = 0);
  void update(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  uint64_t seed_;
  uint64_t lane_[4];
  uint64_t total_ = 0;
  unsigned char pending_[32];
  size_t pending_bytes_ = 0;
};

std::string hex(uint64_t hash);  // 16 lower-case digits, as xxhsum -H1 prints them
std::string xxh64_hex(const std::string& bytes);
// Reads the whole file; DataError with the system's reason.
std::string xxh64_of_file(const std::string& path);

}  // namespace kestrel
