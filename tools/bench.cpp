// kestrel bench: how fast this machine trains.
#include <cstdio>
#include <memory>

#include "kernels/core/device.h"
#include "src/bench/op_benchmark.h"
#include "src/bench/step_benchmark.h"
#include "tools/command.h"

namespace kestrel::tools {

namespace {

struct OpCommand {
  std::vector<std::string> names;
  std::string shape, device = "auto", dtype;
  int64_t samples = 9;
  bool json = false;
};

int time_ops(const OpCommand& c) {
  OpOptions o;
  const DeviceCount gpus = device_count();
  if (c.device == "cuda" && gpus.count == 0) throw DeviceError("--device cuda: " + gpus.reason + ". Use --device cpu.");
  o.device = c.device != "cpu" && gpus.count > 0 ? Device::cuda : Device::cpu;
  o.dtype = c.dtype == "bf16" || (c.dtype.empty() && o.device == Device::cuda) ? DType::bf16 : DType::f32;
  if (o.device == Device::cpu && o.dtype == DType::bf16) {
    throw ConfigError("--dtype bf16: the CPU computes in fp32. Leave --dtype out, or time on a GPU.");
  }
  o.samples = c.samples;
  if (!c.shape.empty() && c.names.size() != 1) {
    throw ConfigError(text("--shape goes with one operation, ", c.names.size(), " were named."));
  }
  std::vector<OpTiming> timings;
  for (const std::string& name : c.names.empty() ? op_names() : c.names) {
    const OpShape shape = parse_shape(name, o.device, c.shape);
    timings.push_back(benchmark_op(name, shape, o));
    if (!c.json && c.names.size() != 1) std::fprintf(stderr, "%s\n", name.c_str());
  }
  std::printf("%s\n", (c.json ? timings_json(timings) : timings_text(timings)).c_str());
  return 0;
}

void add_op_command(CLI::App& bench, int& exit_code) {
  auto o = std::make_shared<OpCommand>();
  CLI::App& c = add_command(bench, "op", "Time operations beside what bounds them: bytes, FLOPs, fraction of the bound",
                            "kestrel bench op rms_norm_forward --shape N=4096,D=1024\nkestrel bench op");
  std::string known = "Operations to time; none: all. Known:";
  for (const std::string& name : op_names()) known += " " + name;
  c.add_option("NAME", o->names, known);
  c.add_option("--shape", o->shape, "Sizes that differ from the default, as N=4096,D=1024");
  c.add_option("--device", o->device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  c.add_option("--dtype", o->dtype, "fp32 or bf16 activations; default: bf16 on a GPU, fp32 on the CPU")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  add_integer(c, "--samples", o->samples, "Timings to take the median of", 1, kMaxSize);
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] { exit_code = time_ops(*o); });
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  struct Options {
    RunFile run;
    StepBenchmarkOptions benchmark;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App& bench = add_command(app, "bench", "Time a training step or single operations",
                                "kestrel bench step configs/quickstart.json");
  bench.require_subcommand(1);
  add_op_command(bench, exit_code);
  CLI::App& c = add_command(bench, "step", "Time the step of a run file on random tokens (no data is read)",
                            "kestrel bench step configs/quickstart.json train.micro_batch_size=8");
  add_run_file(c, o->run);
  add_integer(c, "--repeats", o->benchmark.repeats, "Micro-batches to time", 1, kMaxSize);
  add_integer(c, "--updates", o->benchmark.updates, "Updates to time", 1, kMaxSize);
  add_integer(c, "--warmup", o->benchmark.warmup, "Micro-batches before the first timed one", 0, kMaxSize);
  c.add_flag("--profile", o->benchmark.profile, "Also show where one step goes, by operation");
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] {
    const StepBenchmark b = benchmark_step(o->run.load(), o->benchmark);
    std::printf("%s\n", (o->json ? benchmark_json(b) : benchmark_text(b)).c_str());
    exit_code = 0;
  });
}

}  // namespace kestrel::tools
