// kestrel train: a run file in, a trained model out.
#include <cstdio>
#include <memory>

#include "src/train/trainer.h"
#include "tools/command.h"

namespace kestrel::tools {

void add_train_command(CLI::App& app, int& exit_code) {
  struct Options {
    RunFile run;
    bool dry_run = false, profile = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "train", "Train (or go on training) the model of a run file",
                            "kestrel train configs/quickstart.json train.steps=50 log.dir=runs/short\n"
                            "kestrel train configs/quickstart.json --dry-run");
  add_run_file(c, o->run);
  c.add_flag("--dry-run", o->dry_run, "Resolve and check everything, show the plan, train nothing");
  c.add_flag("--profile", o->profile,
             "Add up the time of each operation (NVTX ranges too) and print the table at the end");
  c.callback([o, &exit_code] {
    Trainer trainer(o->run.load(), o->dry_run ? Trainer::Purpose::dry_run : Trainer::Purpose::train);
    if (o->dry_run) {
      std::fputs(trainer.description().c_str(), stdout);
      return;
    }
    if (o->profile) trainer.profile();
    exit_code = static_cast<int>(trainer.run());
  });
}

}  // namespace kestrel::tools
