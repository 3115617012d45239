// Reading and writing safetensors files: u64 length | JSON header | data (little endian, C order).
//
// The reader maps the file and hands out views; it checks the whole header before anything is used (lengths, offsets
// without holes or overlap, shapes that fit their bytes) and throws DataError naming the file, the tensor and the way
// out.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/core/tensor.h"

namespace kestrel {

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& o) noexcept;
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
  std::string path_;
  void* map_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;                 // host memory, contiguous
  std::vector<int64_t> shape{};  // shape to record, when it is not the tensor's own
};

// Writes the whole file (name is overwritten), synced to disk.  Throws DataError with the system's reason; a short
// write or a full disk is an error, and the partial file is removed.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kestrel
