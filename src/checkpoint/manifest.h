// manifest.json of a checkpoint (its form: checkpoint.h) and the folders under a root.  For src/checkpoint alone.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/core/dtype.h"

namespace kestrel {

inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kTrainStateFile = "train_state.json";
inline constexpr const char* kLatestFile = "latest";
inline constexpr const char* kTemporaryPrefix = ".tmp-";

struct Manifest {
  struct File {
    int64_t bytes = 0;
    std::string xxh64;
  };
  struct Part {
    std::string file;
    int64_t first = 0, rows = 0;
  };
  struct Tensor {
    DType dtype = DType::f32;
    std::vector<int64_t> shape;  // global
    std::vector<Part> parts;     // by first row

    int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
    int64_t row_bytes() const {
      int64_t n = size_of(dtype);
      for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
      return n;
    }
  };

  int64_t step = 0;
  int64_t sequence = 0;
  std::map<std::string, File> files;
  std::map<std::string, Tensor> tensors;
};

// DataError when it is missing, not ours, of a newer format, or altered (it carries its own checksum).
Manifest read_manifest(const std::string& dir);
void write_manifest(const std::string& dir, const Manifest& m);

// DataError naming the first file whose size or checksum differs.
void verify_files(const std::string& dir, const Manifest& m);
// DataError when the parts of a tensor overlap, leave rows out, or go beyond its shape.
void check_coverage(const std::string& dir, const Manifest& m);

// What a finished folder holds: every safetensors file's tensors and every file's size and checksum.
Manifest describe_folder(const std::string& dir, int64_t step);

// The record of a part in its shard's metadata: under part_key(tensor), the global shape and the first row.
std::string part_key(const std::string& tensor);
std::string part_record(const std::vector<int64_t>& global_shape, int64_t first);

struct CheckpointFolder {
  std::string path;
  std::string name;
  int64_t step = 0;
  int64_t sequence = -1;  // -1: the manifest cannot be read, `damage` says why
  std::string damage;
};
std::string folder_name(int64_t step);
// Folders step_N under root: first those whose manifest cannot be read, then the rest, saved last first.  Empty when
// root does not exist.
std::vector<CheckpointFolder> list_checkpoints(const std::string& root);

}  // namespace kestrel
