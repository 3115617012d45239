// kestrel train: a run file in, a trained model out; alone or under mpirun.
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>

#include "src/train/trainer.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct Options {
  RunFile run;
  bool dry_run = false, profile = false;
};

int train(const Options& o, Communicator& ranks) {
  Trainer trainer(o.run.load(), o.dry_run ? Trainer::Purpose::dry_run : Trainer::Purpose::train, ranks);
  if (o.dry_run) {
    const std::string description = trainer.description();
    if (ranks.is_root()) std::fputs(description.c_str(), stdout);
    return static_cast<int>(ExitCode::done);
  }
  if (o.profile) trainer.profile();
  return static_cast<int>(trainer.run());
}

// A rank that fails ends all of them, with its exit code.  What fails everywhere alike the root says, once: the others
// give it a second to speak first.
int on_all_ranks(Communicator& ranks, const std::function<int()>& work) {
  if (ranks.size() == 1) return work();
  int code = 0;
  try {
    return work();
  } catch (...) {
    if (!ranks.is_root()) std::this_thread::sleep_for(std::chrono::seconds(1));
    std::fflush(stdout);
    code = report_failure(ranks.is_root() ? "" : text("rank ", ranks.rank(), " on ", host_name(), ": "));
  }
  ranks.abort(code);
  return code;  // never reached: GCC forgets [[noreturn]] on its guess of which abort this is
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "train", "Train (or go on training) the model of a run file",
                            "kestrel train configs/quickstart.json train.steps=50 log.dir=runs/short\n"
                            "kestrel train configs/quickstart.json --dry-run\n"
                            "mpirun -np 2 kestrel train configs/quickstart.json train.micro_batch_size=2");
  add_run_file(c, o->run);
  c.add_flag("--dry-run", o->dry_run, "Resolve and check everything, show the plan, train nothing");
  c.add_flag("--profile", o->profile,
             "Add up the time of each operation (NVTX ranges too) and print the table at the end");
  c.callback([o, &exit_code] {
    const std::unique_ptr<Communicator> ranks = join_ranks();
    exit_code = on_all_ranks(*ranks, [&] { return train(*o, *ranks); });
  });
}

}  // namespace kestrel::tools
