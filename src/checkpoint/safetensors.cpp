#include "src/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "src/checkpoint/files.h"
#include "src/checkpoint/json_strict.h"
#include "src/checkpoint/nearest.h"

namespace kestrel {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr int64_t kMaxElements = int64_t{1} << 50;

struct Mapping {
  std::shared_ptr<const void> memory;
  uint64_t size;
};

Mapping map_file(const std::string& path) {
  // O_NONBLOCK: opening a pipe by mistake must not hang.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    throw DataError(
        text("cannot open ", path, ": ", std::strerror(errno), ". Check its name and that it may be read."));
  }
  struct stat st {};
  const bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
  const auto size = static_cast<uint64_t>(st.st_size);
  if (!regular || size < 8) {
    close(fd);
    if (!regular) throw DataError(text(path, " is not a regular file. Name a file on disk."));
    throw DataError(
        text(path, " has ", size,
             " bytes; a safetensors file starts with an 8-byte header length. The file is empty or truncated."));
  }
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int reason = errno;
  close(fd);
  if (memory == MAP_FAILED) throw DataError(text("cannot map ", path, ": ", std::strerror(reason)));
  return {std::shared_ptr<const void>(memory, [size](const void* p) { munmap(const_cast<void*>(p), size); }), size};
}

struct Header {
  DType dtype;
  std::vector<int64_t> shape;
  int64_t begin, end;
};

bool whole_number(const json& j) {
  return j.is_number_integer() && (j.is_number_unsigned() ? j.get<uint64_t>() <= INT64_MAX : j.get<int64_t>() >= 0);
}

// One entry of the header; `bad` makes the error.
template <class Bad>
Header read_entry(const json& e, const Bad& bad) {
  const auto is_array = [&](const char* key) { return e.contains(key) && e[key].is_array(); };
  if (!e.is_object() || !e.contains("dtype") || !e["dtype"].is_string() || !is_array("shape") ||
      !is_array("data_offsets") || e["data_offsets"].size() != 2) {
    throw bad("it has no dtype, shape and data_offsets");
  }
  const auto dtype = dtype_from_name(e["dtype"].get<std::string>());
  if (!dtype) throw bad(text("it has dtype ", e["dtype"].dump(), ", which Kestrel does not read"));
  Header h{*dtype, {}, 0, 0};
  int64_t elements = 1;
  for (const auto& d : e["shape"]) {
    if (!whole_number(d)) throw bad(text("the dimension ", d.dump(), " is not a whole number >= 0"));
    const int64_t n = d.get<int64_t>();
    if (n != 0 && elements > kMaxElements / n) throw bad(text("its shape ", e["shape"].dump(), " overflows"));
    elements *= n;
    h.shape.push_back(n);
  }
  const json& offsets = e["data_offsets"];
  if (!whole_number(offsets[0]) || !whole_number(offsets[1])) {
    throw bad(text("its data_offsets ", offsets.dump(), " are not whole numbers >= 0"));
  }
  h.begin = offsets[0].get<int64_t>();
  h.end = offsets[1].get<int64_t>();
  const int64_t needed = elements * size_of(*dtype);
  if (h.end < h.begin || h.end - h.begin != needed) {
    throw bad(
        text("its shape ", e["shape"].dump(), " needs ", needed, " bytes, its data_offsets are ", offsets.dump()));
  }
  return h;
}

void check_no_hole(const std::string& path, std::vector<std::pair<int64_t, int64_t>> ranges, int64_t data_bytes) {
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const auto& [a, b] : ranges) {
    if (a != end) {
      throw DataError(text(path, ": tensors ", a < end ? "overlap" : "leave a hole", " at byte ", std::min(a, end),
                           " of the data. The file is damaged."));
    }
    end = b;
  }
  if (end != data_bytes) {
    throw DataError(text(path, ": the header describes ", end, " bytes of data, the file holds ", data_bytes,
                         ". It is truncated or damaged."));
  }
}

}  // namespace

std::optional<DType> dtype_from_name(const std::string& name) {
  for (DType t : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::u8, DType::i8, DType::u16, DType::i16,
                  DType::i32, DType::u32, DType::i64, DType::u64, DType::boolean}) {
    if (name == name_of(t)) return t;
  }
  return std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const Mapping m = map_file(path);
  map_ = m.memory;
  read_header(static_cast<const char*>(m.memory.get()), m.size);
}

void SafetensorsFile::read_header(const char* bytes, uint64_t size) {
  uint64_t n = 0;
  std::memcpy(&n, bytes, 8);
  if (n > kMaxHeader || n > size - 8) {
    throw DataError(text(path_, " says its header has ", n, " bytes, but the file has ", size, " (and at most ",
                         kMaxHeader, " are read). It is truncated or not a safetensors file."));
  }
  const std::string what = path_ + ": the safetensors header";
  if (n == 0 || bytes[8] != '{') throw DataError(text(what, " is not a JSON object. The file is damaged."));
  const json head = parse_json_strict({bytes + 8, n}, what);
  const char* data = bytes + 8 + n;
  const auto data_bytes = static_cast<int64_t>(size - 8 - n);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, e] : head.items()) {
    if (name == "__metadata__") {
      if (!e.is_object()) throw DataError(text(what, " has a __metadata__ that is no object. The file is damaged."));
      for (const auto& [k, v] : e.items()) metadata_[k] = v.is_string() ? v.get<std::string>() : v.dump();
      continue;
    }
    const auto bad = [&, &key = name](const std::string& why) {
      return DataError(text(path_, ": tensor \"", key, "\": ", why, ". The file is damaged or of another kind."));
    };
    Header h = read_entry(e, bad);
    if (h.end > data_bytes) {
      throw bad(text("bytes ", h.begin, " to ", h.end, " lie outside the ", data_bytes, " bytes of data: truncated"));
    }
    ranges.emplace_back(h.begin, h.end);
    entries_.emplace(name, Entry{h.dtype, std::move(h.shape), data + h.begin, h.end - h.begin});
  }
  check_no_hole(path_, std::move(ranges), data_bytes);
  for (auto& [name, e] : entries_) {
    if (reinterpret_cast<uintptr_t>(e.data) % static_cast<uintptr_t>(size_of(e.dtype)) == 0) continue;
    copies_.push_back(std::make_unique<uint64_t[]>(static_cast<size_t>(e.bytes / 8 + 1)));
    std::memcpy(copies_.back().get(), e.data, static_cast<size_t>(e.bytes));
    e.data = copies_.back().get();
  }
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    throw DataError(text(path_, " has no tensor \"", name, "\".", name_hint(name, entries_)));
  }
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
  std::vector<const NamedTensor*> order;
  for (const auto& nt : tensors) order.push_back(&nt);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
  });
  json head = json::object();
  if (!metadata.empty()) head["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const NamedTensor* nt : order) {
    const Tensor& t = nt->tensor;
    KESTREL_CHECK(t.contiguous() && t.device == Device::cpu, nt->name, " is ", t.describe(), ", cannot be written");
    KESTREL_CHECK(!head.contains(nt->name), "tensor name ", nt->name, " twice");
    std::vector<int64_t> dims = nt->shape;
    if (dims.empty()) dims.assign(t.shape.begin(), t.shape.begin() + t.rank);
    int64_t elements = 1;
    for (int64_t d : dims) elements *= d;
    KESTREL_CHECK(elements == t.numel(), nt->name, " is ", t.describe(), ", its shape to record has ", elements,
                  " elements");
    head[nt->name] = {{"dtype", name_of(t.dtype)}, {"shape", dims}, {"data_offsets", {offset, offset + t.bytes()}}};
    offset += t.bytes();
  }
  std::string h;
  try {
    h = head.dump();
  } catch (const json::exception& e) {
    throw DataError(text("cannot write ", path, ": a tensor name or a metadata value is not UTF-8: ", e.what()));
  }
  h.resize((h.size() + 8 + 63) / 64 * 64 - 8, ' ');
  if (h.size() > kMaxHeader) {
    throw DataError(text("cannot write ", path, ": its header has ", h.size(), " bytes, readers take at most ",
                         kMaxHeader, ". Write fewer tensors per file."));
  }
  AtomicFile file(path);
  const uint64_t n = h.size();
  file.write(&n, 8);
  file.write(h.data(), static_cast<int64_t>(h.size()));
  for (const NamedTensor* nt : order) file.write(nt->tensor.data, nt->tensor.bytes());
  file.commit();
}

}  // namespace kestrel
