// Writing files so that a crash or a full disk leaves the old file or the new one, never half of either.
//
// A file is written under a temporary name beside its own, synced, renamed, and its folder synced.  Where the name is
// something else than a regular file (a device, a pipe) it is written in place.  Every failure is a DataError with the
// path, the system's reason and the way out; the temporary file is then gone and the old file as it was.
#pragma once

#include <cstdint>
#include <string>

namespace kestrel {

class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // removes what was not committed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, int64_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what);
  void discard() noexcept;

  std::string path_;
  std::string written_;  // where the bytes go until the commit
  int fd_ = -1;
};

void write_file(const std::string& path, const std::string& content);
std::string read_file(const std::string& path);
void sync_directory(const std::string& dir);

}  // namespace kestrel
