// report.html of a run: one file that a browser opens as it is, made from metrics.jsonl and config.json.
//
// Curves: loss (train and validation), learning rate, gradient norm, tokens per second, and max_violation where there
// are experts.  A table has the final figures; the resolved run file is folded in at the end.
#pragma once

#include <string>
#include <vector>

#include "src/report/metrics.h"
#include "src/report/svg.h"

namespace kestrel {

// Writes run_dir/report.html and run_dir/loss.svg (the loss curve alone, for a README) and returns the path of the
// first.  DataError when there are no metrics or the folder cannot be written.
std::string write_report(const std::string& run_dir);

// Its parts.
Chart loss_chart(const std::vector<MetricRow>& rows);
std::vector<std::pair<std::string, std::string>> final_figures(const std::vector<MetricRow>& rows);
std::string report_html(const std::string& title, const std::vector<MetricRow>& rows, const std::string& config_json);

}  // namespace kestrel
