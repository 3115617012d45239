// A file that grows by whole records and is never buffered: a killed process loses nothing it wrote.
#pragma once

#include <cstdint>
#include <string>

namespace kestrel {

class AppendFile {
 public:
  // `way_out`: the sentence that ends every error, for example "Free space, or set log.dir elsewhere."
  AppendFile(std::string path, std::string way_out);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  const std::string& path() const { return path_; }
  void truncate(int64_t bytes);  // does nothing on a device or a pipe
  void append(const std::string& record);

 private:
  [[noreturn]] void fail(const std::string& why) const;

  std::string path_, way_out_;
  int fd_ = -1;
};

}  // namespace kestrel
