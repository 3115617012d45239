// Wall-clock times of queued work.  Included by this room only.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels/core/device.h"

namespace kestrel {

// Seconds a call takes: the mean of `calls` calls queued one after the other.
template <class F>
double seconds_of(const Stream& s, int64_t calls, F&& fn) {
  using Clock = std::chrono::steady_clock;
  wait(s);
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) fn();
  wait(s);
  return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(calls);
}

struct Timing {
  double median = 0;  // seconds
  double spread = 0;  // (largest - smallest) / median
};
// `samples` times of `calls` calls each.
template <class F>
Timing time_samples(const Stream& s, int64_t samples, int64_t calls, F&& fn) {
  std::vector<double> all;
  for (int64_t i = 0; i < samples; ++i) all.push_back(seconds_of(s, calls, fn));
  std::sort(all.begin(), all.end());
  const double median = all[all.size() / 2];
  return {median, (all.back() - all.front()) / median};
}

}  // namespace kestrel
