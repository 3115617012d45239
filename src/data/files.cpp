#include "src/data/files.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

// A file descriptor that closes itself.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw DataError(
      text("cannot ", what, " ", path, ": ", std::strerror(errno), ". Check its name and that it may be read."));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor d{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (d.fd < 0) fail("open", path);
  struct stat st {};
  if (fstat(d.fd, &st) != 0) fail("read", path);
  if (!S_ISREG(st.st_mode)) throw DataError(text(path, " is not a regular file. Name a file on disk."));
  size_ = static_cast<size_t>(st.st_size);
  if (size_ == 0) throw DataError(text(path, " is empty (0 bytes). Write it again, or leave it out."));
  map_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, d.fd, 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    fail("map", path);
  }
}

MappedFile::~MappedFile() {
  if (map_) munmap(map_, size_);
}

std::vector<std::string> expand_globs(const std::vector<std::string>& files_or_globs) {
  std::vector<std::string> files;
  for (const auto& entry : files_or_globs) {
    const bool pattern = entry.find_first_of("*?[") != std::string::npos;
    if (!pattern || access(entry.c_str(), F_OK) == 0) {
      if (access(entry.c_str(), R_OK) != 0) fail("read", entry);
      files.push_back(entry);
      continue;
    }
    glob_t found{};
    const int rc = glob(entry.c_str(), 0, nullptr, &found);
    for (size_t i = 0; rc == 0 && i < found.gl_pathc; ++i) files.emplace_back(found.gl_pathv[i]);
    globfree(&found);
    if (rc != 0)
      throw DataError(text("no file matches ", entry, ". Check the folder, or quote the pattern from the shell."));
  }
  return files;
}

void refuse_to_overwrite(const std::string& output, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code missing;  // what does not exist is equivalent to nothing
  if (fs::is_other(output, missing)) return;
  for (const auto& input : inputs) {
    if (!fs::equivalent(output, input, missing)) continue;
    throw ConfigError(text("the output ", output, " is the input ", input,
                           ", which would be overwritten. Choose another name for the output."));
  }
}

}  // namespace kestrel
