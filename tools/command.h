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
//       add_integer(command, "--batches", options->batches, "Batches to evaluate", 1, kMaxSize);
//       command.callback([options, &exit_code] { exit_code = run_eval(*options); });
//     }
//
// The work goes into a function of its own.  It returns the exit code, or throws kestrel::Error, which main() prints
// as "error: ..." with the error's own exit code.  Rules of the command line (required options, exclusions) are CLI11's
// to check; main() turns its errors into exit code 2.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <CLI/CLI.hpp>

#include "kernels/core/device.h"
#include "kernels/core/error.h"
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

// Of anything that becomes the size of a tensor: any product of two fits int64.
inline constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

// A finite number that `fits`, in decimal digits; `limit` says which, as "a number in [0, 1)".  CLI11's own conversion
// wraps, saturates, reads 010 as 8 and takes "" for 0.
template <class T, class Fits>
CLI::Option* add_number(CLI::App& command, const std::string& name, T& value, const std::string& description,
                        const std::string& limit, Fits fits) {
  const auto parse = [&value, name, limit, fits](const std::string& s) {
    T v{};
    const char* end = s.data() + s.size();
    const auto [stop, error] = std::from_chars(s.data(), end, v);
    if (error != std::errc() || stop != end || !std::isfinite(static_cast<double>(v)) || !fits(v)) {
      throw ConfigError(text(name, " is \"", s, "\"; it must be ", limit, "."));
    }
    value = v;
  };
  return command.add_option_function<std::string>(name, parse, description)
      ->type_name(std::is_integral_v<T> ? "INT" : "FLOAT")
      ->default_str(text(value));
}

// A whole number of [least, most].
template <class T>
CLI::Option* add_integer(CLI::App& command, const std::string& name, T& value, const std::string& description,
                         std::type_identity_t<T> least, std::type_identity_t<T> most) {
  return add_number(command, name, value, description, text("a whole number from ", least, " to ", most),
                    [least, most](T v) { return v >= least && v <= most; });
}

// Where a command computes, by --device and --precision.
struct ComputeChoice {
  std::string device = "cpu", precision = "fp32";

  // ConfigError for BF16 on the CPU, DeviceError without a GPU.
  Device chosen_device() const {
    if (device == "cpu") {
      if (precision == "fp32") return Device::cpu;
      throw ConfigError("--precision bf16: the CPU back end computes in fp32. Use --device cuda, or --precision fp32.");
    }
    const DeviceCount gpus = device_count();
    if (gpus.count == 0) {
      throw DeviceError(text("--device cuda: there is no GPU to compute on: ", gpus.reason, ". Use --device cpu."));
    }
    use_device(0);
    return Device::cuda;
  }
  DType dtype() const { return precision == "bf16" ? DType::bf16 : DType::f32; }
};

inline void add_compute_choice(CLI::App& command, ComputeChoice& o) {
  command.add_option("--device", o.device, "Where to compute")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--precision", o.precision, "fp32, or bf16 on a GPU")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
}

// Prints the exception in flight as "error: ..." behind `who`, and returns the exit code it stands for.
int report_failure(const std::string& who = "");

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
