// Model weights in Hugging Face's layout: one `model.safetensors`, or shards listed by `model.safetensors.index.json`.
//
// Published K3 weights carry the prefix `language_model.` before every text tensor; it is dropped on reading, so that
// `model.norm.weight` finds either form.  Routed experts of the published model are MXFP4: instead of `X.weight` there
// are `X.weight_packed` and `X.weight_scale`; both appear under names(), and `mxfp4()` lists each X.weight.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "src/checkpoint/safetensors.h"

namespace kestrel {

class WeightSource {
 public:
  // `dir` is such a directory, or a .safetensors file itself.  DataError when there are no weights, a shard is missing
  // or damaged, the index names a tensor its file does not have, or two names differ only in the prefix.
  explicit WeightSource(const std::string& dir);

  const std::string& path() const { return path_; }
  std::vector<std::string> files() const;  // all that were opened, the index too
  bool has(const std::string& name) const { return where_.count(without_prefix(name)) != 0; }
  std::vector<std::string> names() const;                              // sorted, without the prefix
  const SafetensorsFile::Entry& entry(const std::string& name) const;  // DataError when missing, with the nearest name
  Tensor tensor(const std::string& name) const;                        // a read-only view into the mapped file
  // "X.weight" for every X whose weight is stored as X.weight_packed and X.weight_scale.
  const std::vector<std::string>& mxfp4() const { return mxfp4_; }

 private:
  struct Place {
    size_t file;
    std::string name;  // as the file spells it
  };
  static std::string without_prefix(const std::string& name);
  const Place& place(const std::string& name) const;
  void open_single(const std::string& file);
  void open_index(const std::string& index);
  void add(const std::string& name, size_t file);
  void find_mxfp4();

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Place> where_;
  std::vector<std::string> mxfp4_;
};

// Writes a new directory `dir` with config.json, the weights (an index too, when they need more than one file) and
// `more_files` (name -> content: tokenizer, generation_config.json).  The directory appears under its name only when it
// is complete.  DataError when `dir` exists and is not empty, or when writing fails; then nothing is left behind.
void write_hf_model(const std::string& dir, const std::vector<NamedTensor>& tensors, const std::string& config_json,
                    int64_t shard_bytes = 5'000'000'000, const std::map<std::string, std::string>& more_files = {});

}  // namespace kestrel
