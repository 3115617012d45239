// metrics.jsonl: one JSON object per line, one line per logged step.
//
// Fields come out in the order given.  JSON has no NaN: such a number is written as null, and the line ends with a
// field "nonfinite" that says which and what, as in  {"step":7,"loss":null,"lr":0.001,"nonfinite":"loss=nan"}.  A line
// is handed to the system in one piece as soon as it is complete, so a killed run loses none of the lines before.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "src/report/append_file.h"

namespace kestrel {

using MetricValue = std::variant<bool, int64_t, double, std::string, std::vector<double>>;
// {{"step", int64_t{7}}, {"loss", 2.5}, {"balance", std::vector<double>{1.2, 1.1}}}
using MetricLine = std::vector<std::pair<std::string, MetricValue>>;

// Without the newline.  Numbers are the shortest that read back to the same double.
std::string to_json(const MetricLine& line);

class MetricsWriter {
 public:
  // Opens `path` to append.  `resumed_step` = the step of the checkpoint the run goes on from (0: a fresh run, the file
  // starts empty, and an earlier run's is renamed: metrics.1.jsonl, metrics.2.jsonl, ...): lines of later steps, and a
  // last line that a kill left unfinished, are cut off.  So the file of a resumed run is that of an uninterrupted one,
  // but for its times - provided all lines of a step are written before its checkpoint is saved.  DataError with the
  // system's reason.
  MetricsWriter(const std::string& path, int64_t resumed_step);

  // Where an earlier run's lines are now; empty: there were none.
  const std::string& kept() const { return kept_; }

  // The line must have an integer "step".
  void write(const MetricLine& line);

 private:
  std::string kept_;
  AppendFile file_;
};

// What report and tests read back.  A field that is null or missing is absent; numbers of "nonfinite" come back as NaN
// or infinity.
struct MetricRow {
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::vector<double>>> lists;

  std::optional<double> number(const std::string& name) const;
};
// The whole file.  A line that is not of a run is a DataError that names file and line, but for a last one that has
// been cut off, as a killed or a running program leaves it: it is left out, and *unfinished says so.
std::vector<MetricRow> read_metrics(const std::string& path, std::string* unfinished = nullptr);

}  // namespace kestrel
