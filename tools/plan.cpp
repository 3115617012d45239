// kestrel plan: parameters, FLOPs and memory of a run, without allocating it.
#include <cstdio>
#include <memory>

#include "src/train/plan.h"
#include "tools/command.h"

namespace kestrel::tools {

void add_plan_command(CLI::App& app, int& exit_code) {
  struct Options {
    RunFile run;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "plan", "Parameters, FLOPs per token and memory of a run, without allocating it",
                            "kestrel plan configs/k3_2p8t.json");
  add_run_file(c, o->run);
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] {
    const RunConfig config = o->run.load();
    const Plan plan = plan_run(config);
    std::puts((o->json ? plan_json(plan) : plan_text(config, plan)).c_str());
    exit_code = 0;
  });
}

}  // namespace kestrel::tools
