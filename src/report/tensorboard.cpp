#include "src/report/tensorboard.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) ? 0x82F63B78u ^ (c >> 1) : c >> 1;
    t[i] = c;
  }
  return t;
}
constexpr auto kCrcTable = crc_table();

template <class T>
void put_raw(std::string& out, T x) {
  char bytes[sizeof x];
  std::memcpy(bytes, &x, sizeof x);
  out.append(bytes, sizeof x);
}

void put_varint(std::string& out, uint64_t x) {
  for (; x >= 0x80; x >>= 7) out += static_cast<char>(x | 0x80);
  out += static_cast<char>(x);
}

// Fields of protobuf messages: key = number << 3 | wire type.
void put_bytes(std::string& out, int field, const std::string& bytes) {
  put_varint(out, static_cast<uint64_t>(field << 3 | 2));
  put_varint(out, bytes.size());
  out += bytes;
}
void put_integer(std::string& out, int field, int64_t x) {
  put_varint(out, static_cast<uint64_t>(field << 3));
  put_varint(out, static_cast<uint64_t>(x));
}

std::string event(double wall_time) {
  std::string e;
  e += '\x09';  // field 1, 64 bits
  put_raw(e, wall_time);
  return e;
}

uint32_t masked_crc(const std::string& s) {
  const uint32_t c = crc32c(s.data(), s.size());
  return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

std::string record(const std::string& payload) {
  std::string out;
  put_raw(out, static_cast<uint64_t>(payload.size()));
  put_raw(out, masked_crc(out));
  out += payload;
  put_raw(out, masked_crc(payload));
  return out;
}

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A name that no file of the folder has; makes the folder.
std::string new_file(const std::string& dir) {
  std::error_code ec;
  std::filesystem::create_directories(dir, ec);  // if this fails, so does opening the file, with the reason
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  const auto time = static_cast<int64_t>(wall_clock());
  for (int n = 0;; ++n) {
    const auto path = std::filesystem::path(dir) / text("events.out.tfevents.", time, ".", host, ".", getpid(), ".", n);
    if (!std::filesystem::exists(path, ec)) return path.string();
  }
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  uint32_t c = ~0u;
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) c = kCrcTable[(c ^ p[i]) & 255] ^ (c >> 8);
  return ~c;
}

std::string tensorboard_version_record(double wall_time) {
  std::string e = event(wall_time);
  put_bytes(e, 3, "brain.Event:2");
  return record(e);
}

std::string tensorboard_scalar_record(double wall_time, int64_t step,
                                      const std::vector<std::pair<std::string, double>>& scalars) {
  std::string summary;
  for (const auto& [tag, x] : scalars) {
    std::string value;
    put_bytes(value, 1, tag);
    value += '\x15';  // field 2, 32 bits
    put_raw(value, static_cast<float>(x));
    put_bytes(summary, 1, value);
  }
  std::string e = event(wall_time);
  put_integer(e, 2, step);
  put_bytes(e, 5, summary);
  return record(e);
}

std::string tensorboard_restart_record(double wall_time, int64_t step) {
  std::string session_log;
  put_integer(session_log, 1, 1);  // status = START
  std::string e = event(wall_time);
  put_integer(e, 2, step);
  put_bytes(e, 7, session_log);
  return record(e);
}

TensorBoardWriter::TensorBoardWriter(const std::string& dir, int64_t resumed_step)
    : file_(new_file(dir), "Free space, or set log.tensorboard to false.") {
  file_.append(tensorboard_version_record(wall_clock()));
  if (resumed_step > 0) file_.append(tensorboard_restart_record(wall_clock(), resumed_step + 1));
}

void TensorBoardWriter::write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  file_.append(tensorboard_scalar_record(wall_clock(), step, scalars));
}

}  // namespace kestrel
