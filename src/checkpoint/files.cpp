#include "src/checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

// A missing name will become a regular file.
bool is_special(const std::string& path) {
  struct stat st {};
  return stat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode);
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), written_(path) {
  if (!is_special(path)) {
    const std::filesystem::path p(path);
    written_ = (p.parent_path() / text(".tmp-", p.filename().string(), "-", getpid())).string();
  }
  fd_ = open(written_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    throw DataError(text("cannot write ", path_, ": ", std::strerror(errno),
                         ". Check that its folder exists and may be written, or choose another."));
  }
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() noexcept {
  if (fd_ < 0) return;
  close(fd_);
  fd_ = -1;
  if (written_ != path_) unlink(written_.c_str());
}

void AtomicFile::fail(const char* what) {
  const std::string why = std::strerror(errno);
  discard();
  throw DataError(text("cannot ", what, " ", path_, ": ", why,
                       ". Free space or choose another folder; a file of this name is as it was before."));
}

void AtomicFile::write(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30)));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;
    if (n <= 0) fail("write");
    p += n;
    bytes -= n;
  }
}

void AtomicFile::commit() {
  if (written_ == path_) {
    const int closed = close(fd_);
    fd_ = -1;
    if (closed != 0) fail("close");
    return;
  }
  if (fsync(fd_) != 0) fail("sync");
  if (rename(written_.c_str(), path_.c_str()) != 0) fail("rename into place");
  const int closed = close(fd_);
  fd_ = -1;
  if (closed != 0) fail("close");
  sync_directory(parent_of(path_));
}

void write_file(const std::string& path, const std::string& content) {
  AtomicFile file(path);
  file.write(content.data(), static_cast<int64_t>(content.size()));
  file.commit();
}

std::string read_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    throw DataError(
        text("cannot open ", path, ": ", std::strerror(errno), ". Check its name and that it may be read."));
  }
  std::string content;
  char chunk[1 << 16];
  for (;;) {
    const ssize_t n = read(fd, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const std::string why = std::strerror(errno);
      close(fd);
      throw DataError(text("cannot read ", path, ": ", why, ". Check that it is a file, and its disk."));
    }
    if (n == 0) break;
    content.append(chunk, static_cast<size_t>(n));
  }
  close(fd);
  return content;
}

void sync_directory(const std::string& dir) {
  const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  const int reason = errno;
  if (fd >= 0) close(fd);
  // Some network file systems have no sync of a folder and say EINVAL; there is nothing more to be done on those.
  if (!synced && reason != EINVAL) throw DataError(text("cannot sync folder ", dir, ": ", std::strerror(reason)));
}

}  // namespace kestrel
