#include "src/report/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/core/error.h"

namespace kestrel {

AppendFile::AppendFile(std::string path, std::string way_out) : path_(std::move(path)), way_out_(std::move(way_out)) {
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail(std::strerror(errno));
}

AppendFile::~AppendFile() {
  close(fd_);
}

void AppendFile::fail(const std::string& why) const {
  throw DataError(text("cannot write ", path_, ": ", why, ". ", way_out_));
}

void AppendFile::truncate(int64_t bytes) {
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0 && errno != EINVAL) fail(std::strerror(errno));
}

void AppendFile::append(const std::string& record) {
  size_t done = 0;
  while (done < record.size()) {
    const ssize_t n = ::write(fd_, record.data() + done, record.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(std::strerror(n == 0 ? ENOSPC : errno));
    done += static_cast<size_t>(n);
  }
}

}  // namespace kestrel
