// kestrel train: a run file in, a trained model out.
#include <cstdio>
#include <memory>

#include "src/train/trainer.h"
#include "tools/command.h"

namespace kestrel::tools {

void add_train_command(CLI::App& app, int& exit_code) {
  struct Options {
    RunFile run;
    bool dry_run = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "train", "Train (or go on training) the model of a run file",
                            "kestrel train configs/quickstart.json train.steps=50 log.dir=runs/short\n"
                            "kestrel train configs/quickstart.json --dry-run");
  add_run_file(c, o->run);
  c.add_flag("--dry-run", o->dry_run, "Resolve and check everything, show the plan, train nothing");
  c.callback([o, &exit_code] {
    Trainer trainer(o->run.load());
    if (o->dry_run) {
      std::fputs(trainer.description().c_str(), stdout);
      return;
    }
    exit_code = static_cast<int>(trainer.run());
  });
}

}  // namespace kestrel::tools
