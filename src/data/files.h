// Mapped files, file names by pattern, and outputs that are inputs.  Every failure is a DataError with the path, the
// system's reason and the way out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kestrel {

// A regular file mapped read-only.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const char* data() const { return static_cast<const char*>(map_); }
  int64_t size() const { return static_cast<int64_t>(size_); }

 private:
  void* map_ = nullptr;
  size_t size_ = 0;
};

// Each entry that has * ? or [ is replaced by the files it matches, sorted; one that matches none, or a plain path that
// does not exist, throws.
std::vector<std::string> expand_globs(const std::vector<std::string>& files_or_globs);

// ConfigError when `output` is one of the inputs, under whatever name (links, other spellings of the path).  Devices
// and pipes may be both.  Commands ask before they read or write anything; no --force overrides it.
void refuse_to_overwrite(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace kestrel
