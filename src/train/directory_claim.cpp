#include "src/train/directory_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "kernels/core/error.h"

namespace kestrel {
namespace fs = std::filesystem;

DirectoryClaim::Folders::~Folders() {
  std::error_code ignored;  // not empty: it stays
  for (const fs::path& p : made) fs::remove(p, ignored);
}

DirectoryClaim::LockFile::~LockFile() {
  if (fd < 0) return;
  unlink(path.c_str());
  close(fd);
}

DirectoryClaim::DirectoryClaim(const std::string& dir, const std::string& what, const std::string& field)
    : dir_(dir), what_(what), field_(field) {
  make();
  lock();
  sign();
}

void DirectoryClaim::refuse(const std::string& why) const {
  throw DataError(text("cannot write to the ", what_, " ", dir_, ": ", why, ". Choose another ", field_,
                       ", or make this one writable."));
}

void DirectoryClaim::refuse_in_use() const {
  std::ifstream file(lock_.path);
  std::string holder;
  if (!std::getline(file, holder)) holder = "a process that has just started";
  throw DataError(text(
      "the ", what_, " ", dir_, " is in use by another training run: ", holder, " holds ", lock_.path,
      ". Two runs would overwrite each other's files. Wait for that run or stop it, or choose another ", field_, "."));
}

void DirectoryClaim::make() {
  std::error_code ec;
  for (fs::path p = fs::absolute(dir_).lexically_normal(); !fs::exists(p, ec) && p != p.parent_path();
       p = p.parent_path())
    folders_.made.push_back(p);
  fs::create_directories(dir_, ec);
  if (ec) refuse(ec.message());
}

void DirectoryClaim::lock() {
  lock_.path = (fs::path(dir_) / ".lock").string();
  for (;;) {
    const int fd = open(lock_.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) refuse(std::strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      close(fd);
      if (reason == EWOULDBLOCK) refuse_in_use();
      refuse(text("its file system has no locks (", std::strerror(reason), ")"));
    }
    struct stat held {
    }, named{};
    const bool same = fstat(fd, &held) == 0 && stat(lock_.path.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
                      held.st_ino == named.st_ino;
    if (same) {
      lock_.fd = fd;
      return;
    }
    close(fd);  // the holder before removed the file between open and flock
  }
}

// Also the proof that files can be written here.
void DirectoryClaim::sign() {
  char host[256] = "an unknown host";
  gethostname(host, sizeof host - 1);
  const std::string line = text("process ", getpid(), " on ", host, "\n");
  if (ftruncate(lock_.fd, 0) != 0) refuse(std::strerror(errno));
  const ssize_t n = write(lock_.fd, line.data(), line.size());
  if (n != static_cast<ssize_t>(line.size())) refuse(std::strerror(n < 0 ? errno : ENOSPC));
}

}  // namespace kestrel
