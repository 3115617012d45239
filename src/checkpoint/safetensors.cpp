#include "src/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace kestrel {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;

std::optional<DType> dtype_from(const std::string& s) {
  for (DType t : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::u8, DType::i8, DType::u16, DType::i16,
                  DType::i32, DType::u32, DType::i64, DType::u64, DType::boolean}) {
    if (s == name_of(t)) return t;
  }
  return std::nullopt;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw DataError(text("cannot open ", path, ": ", std::strerror(errno)));
  struct stat st {};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    throw DataError(text(path, " is not a regular file"));
  }
  size_ = static_cast<size_t>(st.st_size);
  if (size_ < 8) {
    close(fd);
    throw DataError(
        text(path, " has ", size_,
             " bytes; a safetensors file starts with an 8-byte header length. The file is empty or truncated."));
  }
  map_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    throw DataError(text("cannot map ", path, ": ", std::strerror(errno)));
  }
  try {
    uint64_t n = 0;
    std::memcpy(&n, map_, 8);
    if (n > kMaxHeader || n > size_ - 8) {
      throw DataError(text(path, " says its header has ", n, " bytes, but the file has ", size_,
                           ". It is truncated or not a safetensors file."));
    }
    const char* head = static_cast<const char*>(map_) + 8;
    json j = json::parse(head, head + n, nullptr, /*allow_exceptions=*/false);
    if (!j.is_object())
      throw DataError(text(path, ": the safetensors header is not a JSON object. The file is damaged."));
    const char* data = head + n;
    const int64_t data_bytes = static_cast<int64_t>(size_ - 8 - n);
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (auto& [name, e] : j.items()) {
      if (name == "__metadata__") {
        for (auto& [k, v] : e.items()) metadata_[k] = v.is_string() ? v.get<std::string>() : v.dump();
        continue;
      }
      const auto bad = [&](const std::string& why) {
        return DataError(text(path, ": tensor \"", name, "\": ", why, ". The file is damaged."));
      };
      if (!e.is_object() || !e.contains("dtype") || !e["dtype"].is_string() || !e.contains("shape") ||
          !e["shape"].is_array() || !e.contains("data_offsets") || !e["data_offsets"].is_array() ||
          e["data_offsets"].size() != 2) {
        throw bad("no dtype, shape and data_offsets");
      }
      const auto dtype = dtype_from(e["dtype"].get<std::string>());
      if (!dtype)
        throw DataError(
            text(path, ": tensor \"", name, "\" has dtype ", e["dtype"].dump(), ", which Kestrel does not read"));
      Entry entry{*dtype, {}, nullptr, 0};
      int64_t n_elem = 1;
      for (auto& d : e["shape"]) {
        if (!d.is_number_integer() || d.get<int64_t>() < 0) throw bad("a dimension is not a whole number >= 0");
        const int64_t v = d.get<int64_t>();
        if (v != 0 && n_elem > (int64_t{1} << 50) / v) throw bad("its shape overflows");
        n_elem *= v;
        entry.shape.push_back(v);
      }
      if (!e["data_offsets"][0].is_number_integer() || !e["data_offsets"][1].is_number_integer())
        throw bad("data_offsets are not whole numbers");
      const int64_t a = e["data_offsets"][0].get<int64_t>(), b = e["data_offsets"][1].get<int64_t>();
      if (a < 0 || b < a || b > data_bytes)
        throw bad(text("bytes ", a, " to ", b, " lie outside the ", data_bytes, " bytes of data: truncated"));
      entry.bytes = n_elem * size_of(*dtype);
      if (b - a != entry.bytes) throw bad(text("its shape needs ", entry.bytes, " bytes, its offsets hold ", b - a));
      entry.data = data + a;
      ranges.emplace_back(a, b);
      entries_.emplace(name, std::move(entry));
    }
    std::sort(ranges.begin(), ranges.end());
    int64_t end = 0;
    for (auto& [a, b] : ranges) {
      if (a != end)
        throw DataError(
            text(path, ": tensors overlap or leave a hole at byte ", std::min(a, end), ". The file is damaged."));
      end = b;
    }
    if (end != data_bytes)
      throw DataError(text(path, ": the header describes ", end, " bytes of data, the file holds ", data_bytes,
                           ". It is truncated or damaged."));
  } catch (...) {
    munmap(map_, size_);
    map_ = nullptr;
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  if (map_) munmap(map_, size_);
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& o) noexcept
    : path_(std::move(o.path_)),
      map_(std::exchange(o.map_, nullptr)),
      size_(o.size_),
      entries_(std::move(o.entries_)),
      metadata_(std::move(o.metadata_)) {}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end())
    throw DataError(text(path_, " has no tensor \"", name, "\" (it has ", entries_.size(), " others)"));
  return it->second;
}

Tensor SafetensorsFile::tensor(const std::string& name) const {
  const Entry& e = entry(name);
  if (e.shape.size() > 4)
    throw DataError(text(path_, ": tensor \"", name, "\" has ", e.shape.size(), " dimensions, at most 4 are read"));
  Tensor t(const_cast<void*>(e.data), {1}, e.dtype);
  if (!e.shape.empty()) {
    t.rank = static_cast<int>(e.shape.size());
    std::copy(e.shape.begin(), e.shape.end(), t.shape.begin());
    t.ld = t.cols();
  }
  return t;
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  json head = json::object();
  if (!metadata.empty()) head["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto& [name, t, shape] : tensors) {
    KESTREL_CHECK(t.contiguous() && t.device == Device::cpu, name, " is ", t.describe(), ", cannot be written");
    KESTREL_CHECK(!head.contains(name), "tensor name ", name, " twice");
    std::vector<int64_t> dims = shape;
    if (dims.empty()) dims.assign(t.shape.begin(), t.shape.begin() + t.rank);
    head[name] = {{"dtype", name_of(t.dtype)}, {"shape", dims}, {"data_offsets", {offset, offset + t.bytes()}}};
    offset += t.bytes();
  }
  std::string h = head.dump();
  h.resize((h.size() + 8 + 63) / 64 * 64 - 8, ' ');

  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw DataError(text("cannot write ", path, ": ", std::strerror(errno)));
  const auto fail = [&](const char* what) {
    const std::string why = std::strerror(errno);
    close(fd);
    unlink(path.c_str());
    throw DataError(
        text(what, " ", path, ": ", why, ". Free space or choose another folder; nothing else was changed."));
  };
  const auto put = [&](const void* p, int64_t n) {
    const char* c = static_cast<const char*>(p);
    while (n > 0) {
      const ssize_t w = write(fd, c, static_cast<size_t>(std::min<int64_t>(n, 1 << 30)));
      if (w < 0 && errno == EINTR) continue;
      if (w < 0) fail("cannot write");
      c += w;
      n -= w;
    }
  };
  const uint64_t n = h.size();
  put(&n, 8);
  put(h.data(), static_cast<int64_t>(h.size()));
  for (const auto& nt : tensors) put(nt.tensor.data, nt.tensor.bytes());
  if (fsync(fd) != 0) fail("cannot sync");
  if (close(fd) != 0) throw DataError(text("cannot close ", path, ": ", std::strerror(errno)));
}

}  // namespace kestrel
