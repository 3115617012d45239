// How long a training step of a run file takes on this machine, on random tokens: no data and no checkpoint is touched.
#pragma once

#include <string>
#include <vector>

#include "kernels/core/profile.h"
#include "src/config/run_config.h"

namespace kestrel {

struct StepBenchmark {
  std::string device, precision;
  int64_t micro_batches = 0;  // of one step
  int64_t tokens_per_step = 0;
  double micro_batch_ms = 0;      // forward and backward, median
  double micro_batch_spread = 0;  // (largest - smallest) / median
  double update_ms = 0;           // norm, clip, optimizer, balance: median
  double step_ms() const { return micro_batch_ms * static_cast<double>(micro_batches) + update_ms; }
  double tokens_per_s() const { return static_cast<double>(tokens_per_step) / step_ms() * 1e3; }
  double flops_per_token = 0;
  double peak_flops = 0;     // of the device at this precision, 0: not known
  int64_t memory_bytes = 0;  // parameters, gradients, optimizer, statistics, arena
  int64_t arena_bytes = 0;
  std::vector<Profiler::Row> profile;  // of one whole step, when asked for
};

struct StepBenchmarkOptions {
  int64_t repeats = 8;  // micro-batches to time
  int64_t updates = 3;  // updates to time
  int64_t warmup = 2;   // micro-batches before the first timed one
  bool profile = false;
};
StepBenchmark benchmark_step(const RunConfig& config, const StepBenchmarkOptions& options);

std::string benchmark_text(const StepBenchmark& b);
std::string benchmark_json(const StepBenchmark& b);

}  // namespace kestrel
