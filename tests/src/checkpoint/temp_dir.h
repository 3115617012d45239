// A folder of one test, and ways to damage what is in it.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace kestrel::test {

class TempDir {
 public:
  enum class Where { disk, memory };  // memory: for tests that write thousands of files, where the system has it
  explicit TempDir(Where where = Where::disk) {
    std::filesystem::path parent = std::filesystem::temp_directory_path();
    if (where == Where::memory && access("/dev/shm", W_OK) == 0) parent = "/dev/shm";
    std::string pattern = (parent / "kestrel-test-XXXXXX").string();
    if (!mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ec;
    std::filesystem::remove_all(path_, ec);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string path(const std::string& name = "") const { return name.empty() ? path_ : path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void spill(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << content;
  EXPECT_TRUE(out.good()) << path;
}

inline void flip_byte(const std::string& path, size_t at) {
  std::string s = slurp(path);
  ASSERT_LT(at, s.size());
  s[at] = static_cast<char>(s[at] ^ 0x10);
  spill(path, s);
}

// While it lives no file of this process can grow beyond `bytes`: the disk is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now = before_;
    now.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &now), 0);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
  sighandler_t handler_;
};

// Runs fn and gives the message of the Error it throws; a test failure when it throws nothing.
template <class E, class F>
std::string error_of(F&& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace kestrel::test
