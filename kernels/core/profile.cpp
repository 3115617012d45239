#include "kernels/core/profile.h"

#include <algorithm>
#include <cstdio>

#include "kernels/core/device.h"
#include "kernels/core/device_cuda.h"

namespace kestrel {

Profiler::~Profiler() {
  if constexpr (kBuiltWithCuda) {
    for (const Record& r : records_) {
      if (r.first) cuda::destroy_event(r.first);
      if (r.last) cuda::destroy_event(r.last);
    }
  }
}

void Profiler::begin(const Stream& s, const char* operation) {
  if (depth_++ > 0) return;
  if (used_ == records_.size()) records_.emplace_back();
  Record& r = records_[used_];
  r.phase = phase_;
  r.operation = operation;
  if constexpr (kBuiltWithCuda) {
    if (device_ == Device::cuda) {
      if (!r.first) {
        r.first = cuda::create_event();
        r.last = cuda::create_event();
      }
      return cuda::record_event(r.first, s.queue);
    }
  }
  r.begin = Clock::now();
}

void Profiler::end(const Stream& s) {
  if (--depth_ > 0) return;
  Record& r = records_[used_++];
  if constexpr (kBuiltWithCuda) {
    if (device_ == Device::cuda) return cuda::record_event(r.last, s.queue);
  }
  r.end = Clock::now();
}

void Profiler::collect(const Stream& s) {
  wait(s);
  for (size_t i = 0; i < used_; ++i) {
    const Record& r = records_[i];
    double ms = std::chrono::duration<double, std::milli>(r.end - r.begin).count();
    if constexpr (kBuiltWithCuda) {
      if (device_ == Device::cuda) ms = cuda::milliseconds_between(r.first, r.last);
    }
    auto row = std::find_if(table_.begin(), table_.end(),
                            [&](const Row& x) { return x.phase == r.phase && x.operation == r.operation; });
    if (row == table_.end()) row = table_.insert(row, Row{r.phase, r.operation, 0, 0});
    ++row->calls;
    row->ms += ms;
  }
  used_ = 0;
}

std::vector<Profiler::Row> Profiler::rows() const {
  std::vector<Row> sorted = table_;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Row& a, const Row& b) { return a.ms > b.ms; });
  return sorted;
}

std::string profile_text(const std::vector<Profiler::Row>& rows, int64_t steps) {
  double total = 0;
  for (const Profiler::Row& r : rows) total += r.ms;
  const double n = static_cast<double>(std::max<int64_t>(1, steps));
  char line[160];
  std::snprintf(line, sizeof line, "%-10s %-34s %12s %8s %10s\n", "phase", "operation", "ms a step", "share", "calls");
  std::string out = line;
  for (const Profiler::Row& r : rows) {
    std::snprintf(line, sizeof line, "%-10s %-34s %12.3f %6.1f %% %10.1f\n", r.phase.c_str(), r.operation.c_str(),
                  r.ms / n, total > 0 ? 100 * r.ms / total : 0.0, static_cast<double>(r.calls) / n);
    out += line;
  }
  std::snprintf(line, sizeof line, "%-10s %-34s %12.3f\n", "all", "", total / n);
  return out + line;
}

namespace {

void push(const char* name) {
  if constexpr (kBuiltWithCuda) cuda::push_range(name);
}
void pop() {
  if constexpr (kBuiltWithCuda) cuda::pop_range();
}

}  // namespace

OpRange::OpRange(Stream& s, const char* operation) : s_(s), active_(!s.planning()) {
  if (!active_) return;
  if (s.device() == Device::cuda) push(operation);
  if (s.profiler) s.profiler->begin(s, operation);
}

OpRange::~OpRange() {
  if (!active_) return;
  if (s_.profiler) s_.profiler->end(s_);
  if (s_.device() == Device::cuda) pop();
}

PhaseRange::PhaseRange(Stream& s, const char* phase) : s_(s), active_(!s.planning()) {
  if (!active_) return;
  if (s.device() == Device::cuda) push(phase);
  if (s.profiler) {
    before_ = s.profiler->phase_;
    s.profiler->phase_ = phase;
  }
}

PhaseRange::~PhaseRange() {
  if (!active_) return;
  if (s_.profiler) s_.profiler->phase_ = before_;
  if (s_.device() == Device::cuda) pop();
}

}  // namespace kestrel
