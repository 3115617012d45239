// kestrel report: report.html and loss.svg of a run, made anew from its metrics.jsonl.
#include <cstdio>
#include <memory>

#include "kernels/core/error.h"
#include "src/report/html.h"
#include "tools/command.h"

namespace kestrel::tools {

void add_report_command(CLI::App& app, int& exit_code) {
  auto run_dir = std::make_shared<std::string>();
  CLI::App& command = add_command(app, "report", "Make report.html and loss.svg of a run from its metrics",
                                  "kestrel report runs/quickstart");
  command.add_option("RUN_DIR", *run_dir, "Folder of the run: it holds metrics.jsonl")->required();
  command.callback([run_dir, &exit_code] {
    std::puts(write_report(*run_dir).c_str());
    exit_code = static_cast<int>(ExitCode::done);
  });
}

}  // namespace kestrel::tools
