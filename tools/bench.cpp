// kestrel bench: how fast this machine trains.
#include <cstdio>
#include <memory>

#include "src/train/step_benchmark.h"
#include "tools/command.h"

namespace kestrel::tools {

void add_bench_command(CLI::App& app, int& exit_code) {
  struct Options {
    RunFile run;
    int64_t repeats = 8, updates = 3, warmup = 2;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App& bench = add_command(app, "bench", "Time a training step", "kestrel bench step configs/quickstart.json");
  bench.require_subcommand(1);
  CLI::App& c = add_command(bench, "step", "Time the step of a run file on random tokens (no data is read)",
                            "kestrel bench step configs/quickstart.json train.micro_batch_size=8");
  add_run_file(c, o->run);
  c.add_option("--repeats", o->repeats, "Micro-batches to time")->check(CLI::PositiveNumber)->capture_default_str();
  c.add_option("--updates", o->updates, "Updates to time")->check(CLI::PositiveNumber)->capture_default_str();
  c.add_option("--warmup", o->warmup, "Micro-batches before the first timed one")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] {
    const StepBenchmark b = benchmark_step(o->run.load(), o->repeats, o->updates, o->warmup);
    std::printf("%s\n", (o->json ? benchmark_json(b) : benchmark_text(b)).c_str());
    exit_code = 0;
  });
}

}  // namespace kestrel::tools
