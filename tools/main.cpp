// The kestrel program: one subcommand a file of this folder.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/core/error.h"
#include "kernels/gemm/gemm.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

// Every subcommand, in the order of `kestrel --help`.
constexpr decltype(&add_config_command) kCommands[] = {
    add_train_command,     add_eval_command,      add_generate_command, add_data_command, add_tokenizer_command,
    add_import_hf_command, add_export_hf_command, add_parity_command,   add_plan_command, add_report_command,
    add_bench_command,     add_config_command,    add_doctor_command,
};

// CLI11 reports a misspelt subcommand as a missing one.
std::string usage_error(const CLI::App& app, const CLI::ParseError& e, int argc, char** argv) {
  if (e.get_name() != "RequiredError" || argc < 2 || app.get_subcommands().size() > 0 || argv[1][0] == '-') {
    return e.what();
  }
  std::string known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  return text("\"", argv[1], "\" is not a command; the commands are ", known);
}

// KESTREL_CPU_GEMM=own|openblas overrides which matrix product serves the CPU.
void choose_cpu_gemm() {
  const char* value = std::getenv("KESTREL_CPU_GEMM");
  if (!value || !*value) return;
  const std::string name = value;
  if (name != "own" && name != "openblas") {
    throw ConfigError(text("KESTREL_CPU_GEMM is \"", name,
                           "\"; the CPU products are \"own\" and \"openblas\". Unset it for the default."));
  }
  if (name == "openblas" && !has_openblas()) {
    throw ConfigError(
        "KESTREL_CPU_GEMM is \"openblas\", but this program was built without OpenBLAS and has only \"own\". Unset it, "
        "or "
        "install OpenBLAS (Debian: libopenblas-dev) and build again.");
  }
  set_cpu_gemm(name == "own" ? CpuGemm::own : CpuGemm::openblas);
}

int run(int argc, char** argv) {
  choose_cpu_gemm();
  CLI::App app("Kestrel trains language models of the Kimi K3 kind: one run file, one program.", "kestrel");
  app.require_subcommand(1);
  app.get_formatter()->column_width(32);
  app.footer(
      "Example:\n  kestrel config configs/quickstart.json train.steps=200\n"
      "`kestrel COMMAND --help` shows the options of a command and an example.\n"
      "Exit codes: 0 done, 1 internal error, 2 usage or run file, 3 data, checkpoint or output, 4 device, memory\n"
      "or communication, 5 diverged, 75 saved after a stop signal (start the same command again).\n"
      "KESTREL_CPU_GEMM=own|openblas chooses the CPU's matrix product (default: kestrel doctor says which).");
  int exit_code = static_cast<int>(ExitCode::done);
  for (const auto add : kCommands) add(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // prints the help that was asked for
    throw ConfigError(
        text(usage_error(app, e, argc, argv), ". `kestrel --help` and `kestrel COMMAND --help` tell more."));
  }
  return exit_code;
}

int fail(ExitCode code, const std::string& message) {
  std::fprintf(stderr, "error: %s\n", message.c_str());
  return static_cast<int>(code);
}

// What a command printed may still be in a buffer, and any write before may have failed unseen.  A code that asks for
// something (start me again) outranks lost output.
int finish_output(int code) {
  errno = 0;
  std::cout.flush();
  if (std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good()) return code;
  const std::string why = errno ? text(": ", std::strerror(errno)) : "";
  const int lost =
      fail(ExitCode::data, text("cannot write to standard output", why,
                                ". The command has done its work, but what it printed is incomplete: free ",
                                "space, or send it elsewhere."));
  return code == 0 ? lost : code;
}

}  // namespace
}  // namespace kestrel::tools

int kestrel::tools::report_failure(const std::string& who) {
  constexpr const char* kMemory =
      "the memory for this cannot be had. Lower the batch, the rows or the sizes of the model, or free memory.";
  try {
    throw;
  } catch (const Error& e) {
    return fail(e.code(), who + e.what());
  } catch (const std::bad_alloc&) {
    return fail(ExitCode::device, who + kMemory);
  } catch (const std::length_error&) {  // a container larger than any memory
    return fail(ExitCode::device, who + kMemory);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "internal error: %s%s\n", who.c_str(), e.what());
    return 1;
  }
}

int main(int argc, char** argv) {
  try {
    return kestrel::tools::finish_output(kestrel::tools::run(argc, argv));
  } catch (...) {
    return kestrel::tools::report_failure();
  }
}
