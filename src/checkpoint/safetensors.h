// Reading and writing safetensors files: u64 length | JSON header | data (little endian, C order).
//
// The reader maps the file and hands out views; it checks the whole header before anything is used (lengths, duplicate
// names, offsets without holes or overlap, shapes that fit their bytes) and throws DataError naming the file, the
// tensor and the way out.  Tensors that another writer left off their alignment are copied, so every view is aligned.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/core/tensor.h"

namespace kestrel {

// "F32" -> DType::f32; nothing for a type Kestrel does not read.
std::optional<DType> dtype_from_name(const std::string& name);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile() = default;
  SafetensorsFile(SafetensorsFile&& o) noexcept = default;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept = default;
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  struct Entry {
    DType dtype;
    std::vector<int64_t> shape;
    const void* data;
    int64_t bytes;
  };

  const std::string& path() const { return path_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return entries_.count(name) != 0; }
  const Entry& entry(const std::string& name) const;  // DataError when missing, with the nearest name
  // A read-only view (the memory must not be written); a scalar is [1]; tensors of more than 4 dimensions throw.
  Tensor tensor(const std::string& name) const;

 private:
  void read_header(const char* bytes, uint64_t size);

  std::string path_;
  std::shared_ptr<const void> map_;                  // unmaps itself
  std::vector<std::unique_ptr<uint64_t[]>> copies_;  // tensors that lay off their alignment
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;                 // host memory, contiguous
  std::vector<int64_t> shape{};  // shape to record, when it is not the tensor's own
};

// Writes the whole file, synced to disk, under a temporary name first: the name then holds all of it, and on any error
// what it held before.  Wide types lie before narrow ones so that all are aligned.  Throws DataError with the system's
// reason; a short write or a full disk is an error.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kestrel
