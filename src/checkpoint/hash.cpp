#include "src/checkpoint/hash.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87ull, kP2 = 0xC2B2AE3D27D4EB4Full, kP3 = 0x165667B19E3779F9ull,
                   kP4 = 0x85EBCA77C2B2AE63ull, kP5 = 0x27D4EB2F165667C5ull;

template <class T>
T load(const unsigned char* p) {
  static_assert(std::endian::native == std::endian::little, "files are little endian");
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

uint64_t mix(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kP2, 31) * kP1;
}

uint64_t fold(uint64_t h, uint64_t lane) {
  return (h ^ mix(0, lane)) * kP1 + kP4;
}

}  // namespace

Xxh64::Xxh64(uint64_t seed) : seed_(seed), lane_{seed + kP1 + kP2, seed + kP2, seed, seed - kP1} {}

void Xxh64::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  total_ += bytes;
  if (pending_bytes_ > 0) {
    const size_t take = std::min(bytes, sizeof pending_ - pending_bytes_);
    if (take > 0) std::memcpy(pending_ + pending_bytes_, p, take);
    pending_bytes_ += take;
    p += take;
    bytes -= take;
    if (pending_bytes_ < sizeof pending_) return;
    for (size_t i = 0; i < 4; ++i) lane_[i] = mix(lane_[i], load<uint64_t>(pending_ + 8 * i));
    pending_bytes_ = 0;
  }
  // In locals, so that the four chains of multiplications stay in registers and run side by side.
  uint64_t a = lane_[0], b = lane_[1], c = lane_[2], d = lane_[3];
  for (; bytes >= 32; bytes -= 32, p += 32) {
    a = mix(a, load<uint64_t>(p));
    b = mix(b, load<uint64_t>(p + 8));
    c = mix(c, load<uint64_t>(p + 16));
    d = mix(d, load<uint64_t>(p + 24));
  }
  lane_[0] = a, lane_[1] = b, lane_[2] = c, lane_[3] = d;
  if (bytes > 0) std::memcpy(pending_, p, bytes);
  pending_bytes_ = bytes;
}

uint64_t Xxh64::digest() const {
  uint64_t h = seed_ + kP5;
  if (total_ >= 32) {
    h = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) + std::rotl(lane_[3], 18);
    for (uint64_t lane : lane_) h = fold(h, lane);
  }
  h += total_;
  const unsigned char* p = pending_;
  size_t left = pending_bytes_;
  for (; left >= 8; left -= 8, p += 8) h = std::rotl(h ^ mix(0, load<uint64_t>(p)), 27) * kP1 + kP4;
  for (; left >= 4; left -= 4, p += 4) h = std::rotl(h ^ (load<uint32_t>(p) * kP1), 23) * kP2 + kP3;
  for (; left > 0; --left, ++p) h = std::rotl(h ^ (*p * kP5), 11) * kP1;
  h = (h ^ (h >> 33)) * kP2;
  h = (h ^ (h >> 29)) * kP3;
  return h ^ (h >> 32);
}

std::string hex(uint64_t hash) {
  std::string s(16, '0');
  for (size_t i = 0; i < 16; ++i) s[i] = "0123456789abcdef"[(hash >> (60 - 4 * i)) & 15];
  return s;
}

std::string xxh64_hex(const std::string& bytes) {
  Xxh64 h;
  h.update(bytes.data(), bytes.size());
  return hex(h.digest());
}

std::string xxh64_of_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw DataError(text("cannot open ", path, ": ", std::strerror(errno)));
  // read() rather than a mapping: a bad disk is then an error with a reason, not a signal.
  std::vector<char> chunk(size_t{1} << 18);  // stays in the second-level cache
  Xxh64 h;
  for (;;) {
    const ssize_t n = read(fd, chunk.data(), chunk.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const std::string why = std::strerror(errno);
      close(fd);
      throw DataError(text("cannot read ", path, ": ", why));
    }
    if (n == 0) break;
    h.update(chunk.data(), static_cast<size_t>(n));
  }
  close(fd);
  return hex(h.digest());
}

}  // namespace kestrel
