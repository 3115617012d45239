// kestrel config: the run file as the program understands it.
#include <cstdio>
#include <memory>

#include "kernels/core/error.h"
#include "src/config/describe.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct Options {
  RunFile run;
  bool schema = false;
  bool reference = false;
  bool hash = false;
  std::string explain;
};

std::string answer(const Options& o) {
  if (o.schema) return config_schema();
  if (o.reference) return config_reference();
  if (!o.explain.empty()) return explain_field(o.explain);
  if (o.run.path.empty()) {
    throw ConfigError(
        "nothing to show: name a run file, as in kestrel config configs/quickstart.json, or use --schema, --reference "
        "or --explain FIELD.");
  }
  const RunConfig config = o.run.load();
  return o.hash ? config_hash(config) + "\n" : to_json(config);
}

}  // namespace

void add_config_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App& command = add_command(app, "config", "Check a run file and print it resolved; explain its fields",
                                  "kestrel config configs/quickstart.json train.steps=200\n"
                                  "kestrel config --explain gate_lower_bound");
  add_run_file(command, options->run, /*required=*/false);
  CLI::Option* schema = command.add_flag("--schema", options->schema, "Print the JSON schema of run files");
  CLI::Option* reference = command.add_flag("--reference", options->reference, "Print the reference page (Markdown)");
  CLI::Option* explain = command.add_option("--explain", options->explain, "Explain one field or section");
  command.add_flag("--hash", options->hash, "Print the hash of the resolved run file alone");
  schema->excludes(reference)->excludes(explain);
  reference->excludes(explain);
  command.callback([options, &exit_code] {
    std::fputs(answer(*options).c_str(), stdout);
    exit_code = static_cast<int>(ExitCode::done);
  });
}

}  // namespace kestrel::tools
