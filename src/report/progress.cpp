#include "src/report/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "kernels/core/error.h"

namespace kestrel {

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto s = static_cast<long long>(std::llround(seconds));
  const long long days = s / 86400;
  char out[64];
  std::snprintf(out, sizeof out, "%lld:%02lld:%02lld", s % 86400 / 3600, s % 3600 / 60, s % 60);
  return days > 0 ? text(days, " d ", out) : out;
}

std::string count_text(double n) {
  const char* units[] = {"", "k", "M", "G", "T", "P"};
  size_t u = 0;
  while (std::fabs(n) >= 999.5 && u + 1 < std::size(units)) {
    n /= 1000;
    ++u;
  }
  char out[32];
  std::snprintf(out, sizeof out, std::fabs(n) >= 99.95 ? "%.0f%s" : "%.3g%s", n, units[u]);
  return out;
}

Progress::Progress(std::string what, int64_t total, int64_t done, ProgressOptions options)
    : what_(std::move(what)), total_(total), first_(done), done_(done), options_(std::move(options)) {
  if (!options_.out) options_.out = stderr;
  if (options_.terminal < 0) options_.terminal = isatty(fileno(options_.out)) == 1;
  if (options_.every_s < 0) options_.every_s = options_.terminal ? 0.1 : 10;
  start_ = now();
  next_ = start_ + (options_.terminal ? 0 : options_.every_s);
}

Progress::~Progress() {
  if (!finished_) finish();
}

double Progress::now() const {
  if (options_.clock) return options_.clock();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string Progress::speed_and_rest(double now) const {
  const double elapsed = now - start_;
  if (done_ <= first_ || elapsed <= 0) return "";
  const double per_s = static_cast<double>(done_ - first_) / elapsed;
  std::string s = text(" ", count_text(per_s), "/s");
  if (total_ > 0) s += ", " + duration_text(static_cast<double>(total_ - done_) / per_s) + " left";
  return s;
}

void Progress::update(int64_t done, const std::string& note) {
  done_ = done;
  const double t = now();
  if (t < next_) return;
  next_ = t + options_.every_s;
  std::string line = what_;
  if (total_ > 0) {
    char percent[16];
    std::snprintf(percent, sizeof percent, " %3d%%",
                  static_cast<int>(100. * static_cast<double>(done) / static_cast<double>(total_)));
    line +=
        text(percent, " [", count_text(static_cast<double>(done)), "/", count_text(static_cast<double>(total_)), "]");
  } else {
    line += text(" [", count_text(static_cast<double>(done)), "]");
  }
  line += speed_and_rest(t);
  if (!note.empty()) line += " | " + note;
  print(line, false);
}

void Progress::finish(const std::string& note) {
  if (finished_) return;
  finished_ = true;
  std::string line = text(what_, ": ", count_text(static_cast<double>(done_)),
                          done_ < total_ ? text(" of ", count_text(static_cast<double>(total_))) : "", " in ",
                          duration_text(now() - start_));
  if (!note.empty()) line += " | " + note;
  print(line, true);
}

void Progress::print(const std::string& line, bool last) {
  if (options_.terminal) {
    // Blanks wipe what a longer line left behind.
    const std::string blanks(width_ > line.size() ? width_ - line.size() : 0, ' ');
    std::fprintf(options_.out, "\r%s%s%s", line.c_str(), blanks.c_str(), last ? "\n" : "");
    width_ = last ? 0 : line.size();
  } else {
    std::fprintf(options_.out, "%s\n", line.c_str());
  }
  std::fflush(options_.out);
}

}  // namespace kestrel
