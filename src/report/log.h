// What the program says: plain lines on the console, with a time and a level in log.txt.
//
// A wrapper around spdlog that keeps its headers out of every file that logs.  One per process, passed to who needs it.
#pragma once

#include <memory>
#include <string>

#include "kernels/core/error.h"

namespace kestrel {

struct LogOptions {
  bool console = true;    // false on all ranks but the first
  std::string path = {};  // empty: no file.  The file is appended to.
};

class Log {
 public:
  explicit Log(
      const LogOptions& options = {});  // DataError when the file cannot be opened; later, when it cannot be written
  ~Log();
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;

  // log.info("step ", step, " saved to ", dir)
  template <class... Args>
  void info(const Args&... args) {
    put(Level::info, text(args...));
  }
  template <class... Args>
  void warn(const Args&... args) {
    put(Level::warn, text(args...));
  }
  template <class... Args>
  void error(const Args&... args) {
    put(Level::error, text(args...));
  }

 private:
  enum class Level { info, warn, error };
  void put(Level level, const std::string& line);

  struct Sinks;
  std::unique_ptr<Sinks> sinks_;
};

}  // namespace kestrel
