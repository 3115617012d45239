// Progress of long work: one line redrawn in place on a terminal, a plain line now and then anywhere else.
//
//   train  12% [120/1000] 3.4/s, 0:04:19 left | loss 3.214 | grad norm 0.91
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace kestrel {

struct ProgressOptions {
  std::FILE* out = nullptr;            // null: stderr
  int terminal = -1;                   // 1 or 0; -1: ask the system about `out`
  double every_s = -1;                 // seconds between lines; -1: 0.1 on a terminal, 10 elsewhere
  std::function<double()> clock = {};  // seconds; empty: the steady clock
};

class Progress {
 public:
  // `done` units of `total` are done already (a resumed run): they do not count for the speed.  total <= 0: unknown.
  Progress(std::string what, int64_t total, int64_t done = 0, ProgressOptions options = {});
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Cheap: most calls only look at the clock.  The note comes after the bar, for example the loss.
  void update(int64_t done, const std::string& note = {});
  // The last line, with the time taken in all.  Called by the destructor when it was not.
  void finish(const std::string& note = {});

 private:
  double now() const;
  void print(const std::string& line, bool last);
  std::string speed_and_rest(double now) const;

  std::string what_;
  int64_t total_, first_, done_;
  ProgressOptions options_;
  double start_, next_;
  bool finished_ = false;
  size_t width_ = 0;  // of the line on the terminal
};

std::string duration_text(double seconds);  // "0:04:19", "2 d 3:00:00"
std::string count_text(double n);           // "3.4", "120", "3.4k", "1.25M", "2.8T"

}  // namespace kestrel
