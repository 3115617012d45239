// kestrel report: report.html and loss.svg of a run, made anew from its metrics.jsonl.
#include <cstdio>
#include <memory>

#include "kernels/core/error.h"
#include "src/report/html.h"
#include "src/report/metrics.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

int report(const std::string& run_dir) {
  const std::string metrics = run_dir + "/metrics.jsonl";
  std::string unfinished;
  if (read_metrics(metrics, &unfinished).empty()) {
    throw DataError(
        text(metrics, " holds no steps: there is nothing to report. Give the folder of a run that trained."));
  }
  if (!unfinished.empty()) std::fprintf(stderr, "warning: %s\n", unfinished.c_str());
  std::puts(write_report(run_dir).c_str());
  return static_cast<int>(ExitCode::done);
}

}  // namespace

void add_report_command(CLI::App& app, int& exit_code) {
  auto run_dir = std::make_shared<std::string>();
  CLI::App& command = add_command(app, "report", "Make report.html and loss.svg of a run from its metrics",
                                  "kestrel report runs/quickstart");
  command.add_option("RUN_DIR", *run_dir, "Folder of the run: it holds metrics.jsonl")->required();
  command.callback([run_dir, &exit_code] { exit_code = report(*run_dir); });
}

}  // namespace kestrel::tools
