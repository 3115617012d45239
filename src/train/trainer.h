// The training loop.
//
// A step: the global batch in micro-batches, each forward and backward, gradients summed; global norm and clip; one
// optimizer update; the balance biases of the next step.  Of several ranks each takes its part of the micro-batches;
// losses, gradients, norm and balance statistics are those of all of them, so every rank takes the same decisions; the
// root alone writes the run directory.  A step whose loss or gradient norm is not finite is recorded
// and its update is not applied; three of them in a row stop the run (exit code 5).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/core/transfer.h"
#include "src/checkpoint/checkpoint.h"
#include "src/config/run_config.h"
#include "src/data/loader.h"
#include "src/model/model.h"
#include "src/parallel/mesh.h"
#include "src/train/directory_claim.h"
#include "src/train/optimizer.h"
#include "src/train/plan.h"
#include "src/train/recorder.h"
#include "src/train/train_state.h"

namespace kestrel {

class Trainer {
 public:
  // `dry_run`: everything is checked as for training, over planners instead of memory; only `description` may follow.
  enum class Purpose { train, dry_run };
  // Compares the ranks with each other and the plan with the machine, opens data, claims the run's directories, builds
  // the model, reads the checkpoint to resume or the weights to start from.  What is on disk stays as it is, but for
  // the claims' lock files. With several ranks every function is collective; `ranks` must outlive the trainer.
  explicit Trainer(const RunConfig& config, Purpose purpose = Purpose::train, Communicator& ranks = alone());
  ~Trainer();

  // What --dry-run prints.
  std::string description() const;
  // Adds up the time of each operation from now on and prints the table at the end of `run`.
  void profile();
  // Trains to the end (or to a stop signal), with evaluations and checkpoints on the way.
  ExitCode run();

  struct StepResult {
    double loss = 0, auxiliary_loss = 0, lr = 0, grad_norm = 0;
    double max_violation = 0;       // worst layer's max load / mean load - 1
    std::vector<double> violation;  // per MoE layer
    int64_t clipped_heads = 0;
    bool skipped = false;
  };
  StepResult train_step();
  struct EvalResult {
    double loss = 0, bits_per_byte = 0;  // bits_per_byte 0: the shards carry no byte counts
    int64_t targets = 0;
  };
  EvalResult evaluate();

  Model& model() { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const TrainState& state() const { return state_; }
  const Mesh& mesh() const { return mesh_; }
  int64_t total_steps() const { return total_steps_; }

 private:
  void check_ranks() const;
  void open_data();
  void check_memory() const;
  void claim_directories();
  void build_model();
  void identify();
  void start();
  std::optional<LoadedCheckpoint> checkpoint_to_resume();
  void restore(const LoadedCheckpoint& checkpoint);
  std::vector<std::string> start_warnings();
  void save();
  void allocate_state(Arena& arena);
  MicroBatch upload_batch(const Batch& b, int64_t row);
  int64_t micro_batches() const;  // of a step, on this rank
  double sum_of_losses(int64_t n) const;
  int64_t accumulate_gradients(const std::vector<Batch>& micro_batches);
  void read_back(int64_t losses);
  void record_balance(StepResult& r) const;
  ExitCode finish(int signal);

  RunConfig config_;
  Purpose purpose_;
  Mesh mesh_;
  Device device_;
  std::optional<DirectoryClaim> run_claim_, checkpoint_claim_;
  Plan plan_;
  int64_t total_steps_ = 0;
  std::unique_ptr<DeviceQueue> queue_;
  std::unique_ptr<TokenDataset> train_data_, validation_data_;
  std::unique_ptr<BatchLoader> loader_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Arena> state_memory_, arena_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Recorder> recorder_;  // the root's
  MicroBatch batch_;                    // [rows of a step on this rank, T] ids on the device
  Tensor losses_;                       // [their tokens] F32, on the device
  // The host's side of both, and of the balance statistics (loads [MoE layers, E], auxiliary losses [MoE layers]).
  PinnedBuffer ids_memory_, losses_memory_, loads_memory_, auxiliary_memory_;
  std::unique_ptr<Profiler> profiler_;
  int64_t profiled_steps_ = 0;
  Model::PassOptions pass_;
  TrainState state_;
  std::string resumed_from_;
  std::vector<std::string> changes_;  // of the run file since the checkpoint
  std::vector<RejectedCheckpoint> rejected_;
  int64_t saved_step_ = -1;
};

}  // namespace kestrel
