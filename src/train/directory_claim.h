// A directory that a run writes into: made, tried, and closed to other runs for as long as the run lives.
//
// The lock is an flock on DIR/.lock, so the system gives it back however the process ends; the file says who holds it.
// Readers (generate, eval, report) do not ask for it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kestrel {

class DirectoryClaim {
 public:
  // `what` and `field` name the directory in messages: "run directory", "log.dir".  DataError when it cannot be made or
  // written, or another process has it.
  DirectoryClaim(const std::string& dir, const std::string& what, const std::string& field);
  DirectoryClaim(const DirectoryClaim&) = delete;
  DirectoryClaim& operator=(const DirectoryClaim&) = delete;

 private:
  void make();
  void lock();
  void sign();
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void refuse_in_use() const;

  // At the end of a claim, or when it fails half-way: the lock file goes, then the folders that were made for it and
  // are still empty.
  struct Folders {
    std::vector<std::filesystem::path> made;  // innermost first
    ~Folders();
  };
  struct LockFile {
    std::string path;
    int fd = -1;
    ~LockFile();
  };

  std::string dir_, what_, field_;
  Folders folders_;
  LockFile lock_;
};

}  // namespace kestrel
