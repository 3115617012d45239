// What a run leaves behind for its reader: the run directory (config.json, log.txt, metrics.jsonl, report.html,
// TensorBoard events) and the lines on the console.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/config/run_config.h"
#include "src/report/log.h"
#include "src/report/metrics.h"
#include "src/report/progress.h"
#include "src/report/tensorboard.h"

namespace kestrel {

struct StepRecord {
  int64_t step = 0, tokens = 0;  // updates done (1-based count), tokens seen
  double loss = 0, auxiliary_loss = 0, lr = 0, grad_norm = 0;
  double step_ms = 0, tokens_per_s = 0;
  double max_violation = 0;
  std::vector<double> violation;  // per MoE layer
  int64_t clipped_heads = 0;
  bool skipped = false;
};

struct EvalRecord {
  int64_t step = 0;
  double loss = 0, bits_per_byte = 0;
  int64_t targets = 0;
};

class Recorder {
 public:
  // The run directory must be there.  `resumed_step` = 0: a fresh run.  DataError when a file cannot be written.
  Recorder(const RunConfig& config, int64_t resumed_step, int64_t total_steps);

  // Where the metrics of an earlier run are now; empty: there were none.
  const std::string& kept_metrics() const { return metrics_.kept(); }

  // `resumed_from`: a checkpoint's folder, or empty; `changes`: of the run file since then.
  void start(const std::string& description, const std::vector<std::string>& warnings, const std::string& resumed_from,
             const std::vector<std::string>& changes);
  void step(const StepRecord& r);
  void evaluation(const EvalRecord& r);
  void checkpoint(int64_t step, const std::string& dir);
  void finish(bool complete, int signal, int64_t step);

 private:
  const RunConfig config_;
  int64_t total_;
  Log log_;
  MetricsWriter metrics_;
  Progress progress_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  std::string last_eval_;
  double first_loss_ = 0, last_loss_ = 0;
  bool any_step_ = false;
};

}  // namespace kestrel
