// How a subcommand joins the program.
//
// tools/<name>.cpp defines one function
//
//     void add_<name>_command(CLI::App& app, int& exit_code);
//
// declared below and listed in main.cpp.  It calls add_command(), declares its options on what that returns, and sets a
// callback which does the work:
//
//     void add_eval_command(CLI::App& app, int& exit_code) {
//       struct Options { RunFile run; int64_t batches = 16; };
//       auto options = std::make_shared<Options>();
//       CLI::App& command = add_command(app, "eval", "Loss of a model on a data set", "kestrel eval configs/a.json");
//       add_run_file(command, options->run);
//       command.add_option("--batches", options->batches, "Batches to evaluate")->capture_default_str();
//       command.callback([options, &exit_code] { exit_code = run_eval(*options); });
//     }
//
// The work goes into a function of its own.  It returns the exit code, or throws kestrel::Error, which main() prints
// as "error: ..." with the error's own exit code.  Rules of the command line (required options, exclusions) are CLI11's
// to check; main() turns its errors into exit code 2.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "src/config/run_config.h"

namespace kestrel::tools {

// `example`: a command, or several lines of them, that works from the top of the repository.
inline CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& description,
                             const std::string& example) {
  CLI::App& command = *app.add_subcommand(name, description);
  std::string footer = "Example:\n  ";
  for (const char c : example) footer += c == '\n' ? std::string("\n  ") : std::string(1, c);
  command.footer(footer);
  return command;
}

// RUN.json and the overrides behind it.
struct RunFile {
  std::string path;
  std::vector<std::string> overrides;

  RunConfig load() const { return load_run_config(path, overrides); }
};

// The two positional arguments of a command that works on a run file.
inline void add_run_file(CLI::App& command, RunFile& run, bool required = true) {
  command.add_option("RUN.json", run.path, "Run file (configs/ has some to copy)")->required(required);
  command.add_option("overrides", run.overrides, "Fields to change: train.steps=200 model.residual=standard");
}

void add_train_command(CLI::App& app, int& exit_code);
void add_eval_command(CLI::App& app, int& exit_code);
void add_generate_command(CLI::App& app, int& exit_code);
void add_data_command(CLI::App& app, int& exit_code);
void add_tokenizer_command(CLI::App& app, int& exit_code);
void add_import_hf_command(CLI::App& app, int& exit_code);
void add_export_hf_command(CLI::App& app, int& exit_code);
void add_parity_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_report_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_config_command(CLI::App& app, int& exit_code);
void add_doctor_command(CLI::App& app, int& exit_code);

}  // namespace kestrel::tools
