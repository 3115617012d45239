// Where the time goes: each operation names itself, a profiler of the stream (if there is one) adds up its time.
//
// On a GPU the times are those of events in the stream, so nothing waits while a step runs; and every operation is an
// NVTX range, which costs nothing unless a tool listens.  On the CPU they are wall-clock times.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

class Profiler {
 public:
  explicit Profiler(Device device) : device_(device) {}
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  struct Row {
    std::string phase, operation;
    int64_t calls = 0;
    double ms = 0;
  };
  // Waits for the stream and adds what was recorded since the last call to the table: once a step, say.
  void collect(const Stream& s);
  // Largest time first.
  std::vector<Row> rows() const;

 private:
  friend class OpRange;
  friend class PhaseRange;
  using Clock = std::chrono::steady_clock;
  struct Record {
    const char* phase;
    const char* operation;
    void* first = nullptr;  // cudaEvent_t
    void* last = nullptr;
    Clock::time_point begin, end;
  };
  void begin(const Stream& s, const char* operation);
  void end(const Stream& s);

  Device device_;
  const char* phase_ = "";
  int depth_ = 0;  // operations inside operations count as part of the outer one
  size_t used_ = 0;
  std::vector<Record> records_;  // the first used_; the others only keep their events
  std::vector<Row> table_;
};

// A table of the rows: time of each of `steps` steps, share of all, calls.
std::string profile_text(const std::vector<Profiler::Row>& rows, int64_t steps);

// The time from construction to destruction belongs to `operation`.  Names are literals: the pointer is kept.
class OpRange {
 public:
  OpRange(Stream& s, const char* operation);
  ~OpRange();
  OpRange(const OpRange&) = delete;
  OpRange& operator=(const OpRange&) = delete;

 private:
  const Stream& s_;
  const bool active_;
};

// Operations until destruction belong to `phase` ("forward", "backward", "update").
class PhaseRange {
 public:
  PhaseRange(Stream& s, const char* phase);
  ~PhaseRange();
  PhaseRange(const PhaseRange&) = delete;
  PhaseRange& operator=(const PhaseRange&) = delete;

 private:
  const Stream& s_;
  const char* before_ = "";
  const bool active_;
};

}  // namespace kestrel
