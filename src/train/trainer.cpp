#include "src/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <numbers>

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "kernels/gemm/gemm.h"
#include "kernels/loss/loss.h"
#include "src/checkpoint/hash.h"
#include "src/data/tokenizer.h"
#include "src/model/weights.h"
#include "src/train/device_choice.h"
#include "src/train/rank_checkpoint.h"
#include "src/train/schedule.h"
#include "src/train/stop_signal.h"

namespace kestrel {
namespace {

constexpr int64_t kSkipsBeforeStop = 3;

int64_t valid_targets(const Batch& b) {
  return std::count_if(b.targets.begin(), b.targets.end(), [](int32_t t) { return t != kIgnoreTarget; });
}

// Each refusal is thrown on all ranks alike.
void same_everywhere(Communicator& ranks, const char* what, const std::string& mine) {
  const std::vector<std::string> all = ranks.gather(mine);
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw ConfigError(text("the ranks do not run the same: rank 0 has ", what, " ", all[0], ", rank ", r, " has ",
                           all[r], ". Start all ranks with one program, one run file and one set of data files."));
  }
}

// Before anything else is done together: ranks of other programs or run files would call other collectives.
Communicator& same_run(Communicator& ranks, const RunConfig& config) {
  if (ranks.size() == 1) return ranks;
  same_everywhere(ranks, "the program", xxh64_of_file("/proc/self/exe"));
  TrainState first, mine;
  mine.config_json = to_json(config);
  const std::vector<std::string> all = ranks.gather(mine.config_json);
  first.config_json = all[0];
  for (size_t r = 1; r < all.size(); ++r) {
    mine.config_json = all[r];
    const std::vector<std::string> differ = changed_fields(first, mine);
    if (differ.empty()) continue;
    throw ConfigError(text("the ranks do not run the same: from rank 0 to rank ", r, ", ", differ[0],
                           differ.size() > 1 ? text(" and ", differ.size() - 1, " more") : std::string(),
                           ". Start all ranks with one run file and the same overrides."));
  }
  return ranks;
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Trainer::Trainer(const RunConfig& config, Purpose purpose, Communicator& ranks)
    : config_(config),
      purpose_(purpose),
      mesh_(same_run(ranks, config), config.parallel.expert),
      device_(choose_device(config.train)),
      total_steps_(config.total_steps()) {
  check_ranks();
  if (device_ == Device::cuda) use_device(0);
  plan_ = plan_run(config_, mesh_.world().size());
  check_memory();
  open_data();
  same_everywhere(mesh_.world(), "training data of fingerprint", train_data_->fingerprint());
  claim_directories();
  build_model();
  identify();
  start();
}

Trainer::~Trainer() = default;

void Trainer::open_data() {
  if (config_.data.train.empty()) {
    throw ConfigError(
        "data.train is empty: there is nothing to train on. Make token shards with kestrel data build and list them, "
        "for "
        "example data.train='[\"data/mine/train-*.safetensors\"]'.");
  }
  std::string fingerprint;
  if (config_.data.tokenizer) {
    const Tokenizer tokenizer = Tokenizer::load(*config_.data.tokenizer);
    if (tokenizer.vocab_size() > config_.model.vocab_size) {
      throw ConfigError(text("the tokenizer ", *config_.data.tokenizer, " has ", tokenizer.vocab_size(),
                             " tokens, model.vocab_size is ", config_.model.vocab_size,
                             ". Raise model.vocab_size to at least the tokenizer's."));
    }
    fingerprint = tokenizer.fingerprint();
  }
  const int64_t T = config_.data.sequence_length;
  train_data_ = std::make_unique<TokenDataset>(config_.data.train, T, config_.model.vocab_size, fingerprint);
  if (!config_.data.validation.empty()) {
    validation_data_ =
        std::make_unique<TokenDataset>(config_.data.validation, T, config_.model.vocab_size, train_data_->tokenizer());
  }
  if (config_.model.document_mask && !train_data_->knows_documents()) {
    throw DataError(
        "model.document_mask is on, but the training shards do not say where documents begin (no document_starts, no "
        "eos_id). "
        "Build them with kestrel data build, or turn the mask off.");
  }
  SamplerParams sampler;
  sampler.global_batch_size = config_.train.global_batch_size;
  sampler.shuffle = config_.data.shuffle;
  sampler.seed = static_cast<uint64_t>(config_.data.seed);
  const MicroRange mine{mesh_.world().rank() * micro_batches(), micro_batches()};
  loader_ = std::make_unique<BatchLoader>(*train_data_, sampler, config_.train.micro_batch_size, mine);
}

int64_t Trainer::micro_batches() const {
  return config_.train.global_batch_size / config_.train.micro_batch_size / mesh_.world().size();
}

void Trainer::check_ranks() const {
  const int ranks = mesh_.world().size();
  if (ranks == 1) return;
  const TrainConfig& c = config_.train;
  const int64_t all = c.global_batch_size / c.micro_batch_size;
  if (all % ranks != 0) {
    throw ConfigError(text("a step of ", all, " micro-batches (train.global_batch_size ", c.global_batch_size,
                           " / train.micro_batch_size ", c.micro_batch_size, ") cannot be shared out over ", ranks,
                           " ranks. Start a number of ranks that divides it, or change one of the two sizes."));
  }
  if (mesh_.world().max_of(device_ == Device::cuda) != 0) {
    throw ConfigError(text(
        "several ranks compute on CPUs only, and ",
        c.device == TrainConfig::DeviceChoice::cuda ? "train.device is \"cuda\"" : "train.device \"auto\" found a GPU",
        ": there is no exchange between GPUs yet. Set train.device=cpu, or start one rank."));
  }
}

void Trainer::check_memory() const {
  // CPU ranks of one machine share its memory.
  const std::string host = host_name();
  const std::vector<std::string> hosts = mesh_.world().gather(host);
  const int64_t ranks_here = std::count(hosts.begin(), hosts.end(), host);
  const int64_t needed = plan_.total_bytes() * ranks_here, there = device_memory(device_);
  if (needed <= there) return;
  const auto gib = [](int64_t n) { return static_cast<double>(n) / 0x1p30; };
  const ModelConfig& m = config_.model;
  throw DeviceError(text(
      "this run needs ", gib(needed), " GiB of memory, ",
      ranks_here > 1 ? text("for the ", ranks_here, " ranks on this machine, ") : std::string(),
      device_ == Device::cuda ? "the GPU" : "this machine", " has ", gib(there),
      " GiB. What decides: model.hidden_size ", m.hidden_size, ", model.num_hidden_layers ", m.num_hidden_layers,
      ", model.vocab_size ", m.vocab_size, ", model.num_experts ", m.num_experts, ", train.micro_batch_size ",
      config_.train.micro_batch_size, ", data.sequence_length ", config_.data.sequence_length, ", train.recompute \"",
      to_string(config_.train.recompute), "\". Lower one of them; kestrel plan shows where the bytes go."));
}

void Trainer::claim_directories() {
  if (!mesh_.is_root()) return;
  const std::string &run = config_.log.dir, &checkpoints = config_.checkpoint.dir;
  run_claim_.emplace(run, "run directory", "log.dir");
  std::error_code ec;
  if (!std::filesystem::equivalent(run, checkpoints, ec))
    checkpoint_claim_.emplace(checkpoints, "checkpoint directory", "checkpoint.dir");
}

void Trainer::build_model() {
  const bool dry = purpose_ == Purpose::dry_run;
  pass_ = pass_options(config_.train, device_);
  model_ = std::make_unique<Model>(config_.model, ExpertShare(mesh_));
  if (dry) {
    model_->parameters().plan(device_, pass_.dtype);
  } else {
    model_->parameters().allocate(device_, pass_.dtype, /*gradients=*/true, sums_gradients(config_.train, device_));
  }
  const ParameterStore& store = model_->parameters();
  optimizer_ = std::make_unique<Optimizer>(
      model_->parameters(), config_.optimizer, device_,
      mesh_.world().size() > 1 ? UpdateShares(store, config_.optimizer, mesh_) : UpdateShares(store), /*planned=*/dry);
  // One arena for all steps.
  arena_ = std::make_unique<Arena>(dry ? Arena::planner(device_) : Arena(device_, plan_.arena_bytes));
  stream_ = std::make_unique<Stream>(*arena_);
  if (dry) return;

  queue_ = std::make_unique<DeviceQueue>(device_);
  stream_->queue = queue_->get();
  Arena planner = Arena::planner(device_);
  allocate_state(planner);
  state_memory_ = std::make_unique<Arena>(device_, planner.peak());
  allocate_state(*state_memory_);
}

// The model's statistics, the ids and the losses of all of a step's micro-batches here.
void Trainer::allocate_state(Arena& arena) {
  const int64_t G = micro_batches() * config_.train.micro_batch_size, T = config_.data.sequence_length;
  model_->allocate_state(arena, optimizer_->clips_heads());
  batch_ = MicroBatch::allocate(arena, G, T);
  losses_ = arena.keep({G * T}, DType::f32, "batch");
  if (arena.planning()) return;
  const int64_t layers = static_cast<int64_t>(model_->moe_layers().size());
  ids_memory_ = PinnedBuffer(device_, 3 * G * T * size_of(DType::i32));
  losses_memory_ = PinnedBuffer(device_, G * T * size_of(DType::f32));
  loads_memory_ = PinnedBuffer(device_, layers * config_.model.num_experts * size_of(DType::i32));
  auxiliary_memory_ = PinnedBuffer(device_, layers * size_of(DType::f32));
}

void Trainer::identify() {
  state_.model_hash = config_hash(config_.model);
  state_.model_json = to_json(config_.model);
  state_.config_json = to_json(config_);
  state_.data_fingerprint = train_data_->fingerprint();
  state_.tokenizer = train_data_->tokenizer();
  state_.sequence_length = config_.data.sequence_length;
  state_.global_batch_size = config_.train.global_batch_size;
  state_.data_seed = config_.data.seed;
  state_.shuffle = config_.data.shuffle;
  state_.optimizer_type = to_string(config_.optimizer.type);
}

void Trainer::start() {
  if (const auto checkpoint = checkpoint_to_resume()) {
    restore(*checkpoint);
  } else if (config_.train.init_from) {
    load_weights(model_->parameters(), WeightSource(*config_.train.init_from));
  } else if (purpose_ == Purpose::train) {
    model_->parameters().initialize(static_cast<uint64_t>(config_.train.seed));
  }
}

// Nothing: the run starts at step 0.  Where all checkpoints are damaged that is for the user to say.
std::optional<LoadedCheckpoint> Trainer::checkpoint_to_resume() {
  using Resume = CheckpointConfig::Resume;
  const CheckpointConfig& c = config_.checkpoint;
  if (c.resume == Resume::never) return std::nullopt;
  std::optional<LoadedCheckpoint> found;
  if (mesh_.is_root()) found = find_checkpoint(c.dir, &rejected_);
  if (mesh_.is_root() && !found && (c.resume == Resume::must || !rejected_.empty())) {
    throw DataError(text("checkpoint.resume is \"", to_string(c.resume), "\", but ", c.dir,
                         " holds no good checkpoint.", list_of(rejected_),
                         "\nPoint checkpoint.dir at the run to continue, or set ",
                         "checkpoint.resume=never to start over."));
  }
  const std::string dir = mesh_.world().gather(found ? found->dir : "")[0];
  if (!mesh_.is_root() && !dir.empty()) found = open_checkpoint(dir, /*verify=*/false);
  return found;
}

void Trainer::restore(const LoadedCheckpoint& checkpoint) {
  const TrainState saved = TrainState::from_json(checkpoint.train_state_json, checkpoint.dir);
  check_resumable(saved, state_, total_steps_, checkpoint.dir);
  changes_ = changed_fields(saved, state_);
  load_weights(model_->parameters(), checkpoint);
  optimizer_->for_each_state([&](const Optimizer::StatePart& part) {
    read_part(*stream_, checkpoint, part.name, part.shape, part.first_row, part.tensor);
  });
  state_.step = saved.step;
  state_.updates = saved.updates;
  state_.tokens = saved.tokens;
  state_.skipped = saved.skipped;
  state_.skipped_in_a_row = saved.skipped_in_a_row;
  resumed_from_ = checkpoint.dir;
  saved_step_ = saved.step;
}

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  // Of what several ranks hold each writes the part that it updates.
  HostParts parts;
  model_->parameters().for_each([&](const NamedParameter& p) {
    const UpdateShares::Rows mine = optimizer_->shares().rows_of(*p.member->block);
    const int64_t first = std::max(mine.first, p.first_row), end = std::min(mine.last, p.first_row + p.member->rows);
    if (first >= end) return;
    parts.add(*stream_, p.name, p.shape, first - p.first_row, p.member->block->master.slice(first, end - first));
  });
  optimizer_->for_each_state([&](const Optimizer::StatePart& part) {
    parts.add(*stream_, part.name, part.shape, part.first_row, part.tensor);
  });
  CheckpointPolicy policy;
  policy.keep = config_.checkpoint.keep;
  policy.keep_every = config_.checkpoint.keep_every;
  save_checkpoint(mesh_.world(), config_.checkpoint.dir, state_.step, parts, state_.to_json(), policy);
  saved_step_ = state_.step;
  if (recorder_) recorder_->checkpoint(state_.step, config_.checkpoint.dir);
}

void Trainer::profile() {
  profiler_ = std::make_unique<Profiler>(device_);
  stream_->profiler = profiler_.get();
}

// ---------------------------------------------------------------------------------------------------------- one step

// Queues the copy of a micro-batch to rows [row, row + b.rows) of batch_.  Those rows of the host's side must be done
// with: the wait at the end of a step, or of an evaluated batch, sees to it.
MicroBatch Trainer::upload_batch(const Batch& b, int64_t row) {
  const int64_t G = batch_.tokens.dim(0), T = b.sequence_length;
  const Tensor host = ids_memory_.tensor({3, G, T}, DType::i32);
  const auto put = [&](const Tensor& to, int64_t which, const std::vector<int32_t>& ids) {
    const Tensor from = host[which].slice(row, b.rows);
    std::copy(ids.begin(), ids.end(), from.i32());
    upload(*stream_, to, from);
  };
  const MicroBatch micro = batch_.rows(row, b.rows);
  put(micro.tokens, 0, b.tokens);
  put(micro.targets, 1, b.targets);
  put(micro.segment, 2, b.segment);
  return micro;
}

// Sum of the first n losses read back, in fp64 and in order.
double Trainer::sum_of_losses(int64_t n) const {
  const float* losses = losses_memory_.tensor({n}, DType::f32).f32();
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(losses[i]);
  return sum;
}

// Queues all micro-batches of a step; returns the number of targets on all ranks.
int64_t Trainer::accumulate_gradients(const std::vector<Batch>& micro_batches) {
  int64_t valid = 0, row = 0;
  for (const Batch& b : micro_batches) valid += valid_targets(b);
  valid = mesh_.world().sum_of(valid);
  const float scale = valid > 0 ? static_cast<float>(1.0 / static_cast<double>(valid)) : 0.f;
  for (const Batch& b : micro_batches) {
    const MicroBatch micro = upload_batch(b, row);
    model_->train(*stream_, micro, losses_.slice(row * b.sequence_length, b.rows * b.sequence_length), scale, pass_);
    model_->parameters().fold_gradients(*stream_);
    row += b.rows;
  }
  return valid;
}

// Queues the copies of what the host wants to know about a step, then waits for the device: the only wait of a step.
void Trainer::read_back(int64_t losses) {
  Stream& s = *stream_;
  download(s, losses_memory_.tensor({losses}, DType::f32), losses_.slice(0, losses));
  const std::vector<MoeLayer*>& layers = model_->moe_layers();
  const int64_t L = static_cast<int64_t>(layers.size()), E = config_.model.num_experts;
  for (int64_t l = 0; l < L; ++l) {
    const Balancer& balancer = layers[static_cast<size_t>(l)]->balancer();
    download(s, loads_memory_.tensor({L, E}, DType::i32)[l], balancer.load());
    if (balancer.auxiliary()) {
      download(s, auxiliary_memory_.tensor({L}, DType::f32).slice(l, 1), balancer.auxiliary());
    }
  }
  wait(s);
}

void Trainer::record_balance(StepResult& r) const {
  const std::vector<MoeLayer*>& layers = model_->moe_layers();
  const int64_t L = static_cast<int64_t>(layers.size()), E = config_.model.num_experts;
  for (int64_t l = 0; l < L; ++l) {
    const int32_t* load = loads_memory_.tensor({L, E}, DType::i32)[l].i32();
    int64_t most = 0, total = 0;
    for (int64_t e = 0; e < E; ++e) {
      most = std::max<int64_t>(most, load[e]);
      total += load[e];
    }
    r.violation.push_back(total > 0 ? static_cast<double>(most * E) / static_cast<double>(total) - 1.0 : 0.0);
    r.max_violation = std::max(r.max_violation, r.violation.back());
    if (layers[static_cast<size_t>(l)]->balancer().auxiliary()) {
      r.auxiliary_loss += static_cast<double>(auxiliary_memory_.tensor({L}, DType::f32).f32()[l]);
    }
  }
}

Trainer::StepResult Trainer::train_step() {
  Communicator& ranks = mesh_.world();
  std::vector<Batch> batches;
  const int64_t first = ranks.rank() * micro_batches();
  for (int64_t m = 0; m < micro_batches(); ++m) batches.push_back(loader_->fetch(state_.step, first + m));
  const int64_t tokens = losses_.numel();

  model_->begin_step(*stream_);
  model_->parameters().zero_gradients(*stream_);
  const int64_t targets = accumulate_gradients(batches);
  model_->pool_statistics(*stream_, ranks);
  optimizer_->measure(*stream_, *model_);
  read_back(tokens);

  StepResult r;
  r.loss = ranks.sum_of(sum_of_losses(tokens)) / static_cast<double>(std::max<int64_t>(1, targets));
  r.grad_norm = optimizer_->gradient_norm();
  r.lr = learning_rate(config_.schedule, state_.step, total_steps_);
  record_balance(r);
  state_.tokens += config_.tokens_per_step();
  ++state_.step;
  r.skipped = !std::isfinite(r.loss) || !std::isfinite(r.grad_norm);
  if (r.skipped) {
    ++state_.skipped;
    ++state_.skipped_in_a_row;
    return r;
  }
  state_.skipped_in_a_row = 0;
  ++state_.updates;
  optimizer_->step(*stream_, state_.updates, r.lr, optimizer_->clip_scale(r.grad_norm));
  r.clipped_heads = optimizer_->clip_heads(*stream_, *model_);
  model_->apply_balance(*stream_);
  return r;
}

// The batches are dealt to the ranks in turn; a rank without one takes part with rows that have no targets.
Trainer::EvalResult Trainer::evaluate() {
  Communicator& ranks = mesh_.world();
  const int64_t B = config_.train.micro_batch_size, rows = validation_data_->rows();
  const int64_t last = config_.eval.batches > 0 ? std::min(rows, B * config_.eval.batches) : rows;
  const std::vector<int32_t>& token_bytes = validation_data_->token_bytes();
  EvalResult r;
  double sum = 0, bytes = 0;
  Batch b;
  for (int64_t first = 0; first < last; first += B * ranks.size()) {
    const int64_t row = first + B * ranks.rank();
    read_rows(*validation_data_, row, B, b);
    if (row + B > last)
      std::fill(b.targets.begin() + std::max<int64_t>(last - row, 0) * b.sequence_length, b.targets.end(),
                kIgnoreTarget);
    const int64_t n = B * b.sequence_length;
    model_->evaluate(*stream_, upload_batch(b, 0), losses_.slice(0, n), pass_);
    download(*stream_, losses_memory_.tensor({n}, DType::f32), losses_.slice(0, n));
    wait(*stream_);
    double mine[3] = {sum_of_losses(n), static_cast<double>(valid_targets(b)), 0};
    for (int32_t t : b.targets) {
      if (t != kIgnoreTarget && !token_bytes.empty()) mine[2] += token_bytes[static_cast<size_t>(t)];
    }
    const std::vector<double> all = ranks.gather(std::span<const double>(mine));  // in the order of the batches
    for (size_t i = 0; i < all.size(); i += 3) {
      sum += all[i];
      r.targets += static_cast<int64_t>(all[i + 1]);
      bytes += all[i + 2];
    }
  }
  r.loss = sum / static_cast<double>(std::max<int64_t>(1, r.targets));
  if (bytes > 0) r.bits_per_byte = sum / (std::numbers::ln2 * bytes);
  return r;
}

// ---------------------------------------------------------------------------------------------------------- the loop

ExitCode Trainer::run() {
  const std::string about = description();
  if (mesh_.is_root()) {
    recorder_ = std::make_unique<Recorder>(config_, state_.step, total_steps_);
    recorder_->start(about, start_warnings(), resumed_from_, changes_);
  }
  StopSignal stop;
  // A signal to any rank stops all of them.
  const auto stop_signal = [&] { return static_cast<int>(mesh_.world().max_of(stop.received())); };
  const bool evaluates = validation_data_ && config_.eval.every > 0;

  int signal = stop_signal();
  while (state_.step < total_steps_ && signal == 0) {
    const auto start = std::chrono::steady_clock::now();
    const StepResult r = train_step();
    const int64_t step = state_.step;
    if (profiler_) {
      profiler_->collect(*stream_);
      ++profiled_steps_;
    }

    StepRecord record;
    record.step = step;
    record.tokens = state_.tokens;
    record.loss = r.loss;
    record.auxiliary_loss = r.auxiliary_loss;
    record.lr = r.lr;
    record.grad_norm = r.grad_norm;
    record.step_ms = milliseconds_since(start);
    record.tokens_per_s = static_cast<double>(config_.tokens_per_step()) / record.step_ms * 1e3;
    record.max_violation = r.max_violation;
    record.violation = r.violation;
    record.clipped_heads = r.clipped_heads;
    record.skipped = r.skipped;
    if (recorder_) recorder_->step(record);

    if (state_.skipped_in_a_row >= kSkipsBeforeStop) {
      throw DivergedError(text(
          "loss or gradient norm was not finite in ", kSkipsBeforeStop, " steps in a row, the last one step ", step,
          ". Their updates were not applied; the newest checkpoint is from before them. Lower schedule.peak_lr, "
          "lengthen schedule.warmup_steps, or look at the data of these steps."));
    }
    if (evaluates && (step % config_.eval.every == 0 || step == total_steps_)) {
      const EvalResult e = evaluate();
      if (recorder_) recorder_->evaluation({step, e.loss, e.bits_per_byte, e.targets});
    }
    if (config_.checkpoint.every > 0 && step % config_.checkpoint.every == 0) save();
    signal = stop_signal();
  }
  return finish(signal);
}

// What of an earlier run is not used, and where it stays.
std::vector<std::string> Trainer::start_warnings() {
  std::vector<std::string> out;
  for (const RejectedCheckpoint& r : rejected_)
    out.push_back(text("checkpoint not used: ", r.why, "; kept as ", set_aside(r.dir)));
  if (!recorder_->kept_metrics().empty())
    out.push_back(text("starting over: the metrics of an earlier run are kept as ", recorder_->kept_metrics()));
  if (config_.checkpoint.resume == CheckpointConfig::Resume::never && has_checkpoints(config_.checkpoint.dir))
    out.push_back(text("starting over: the checkpoints of an earlier run in ", config_.checkpoint.dir,
                       " give way to this run's (checkpoint.keep)"));
  return out;
}

ExitCode Trainer::finish(int signal) {
  save();
  const bool complete = state_.step >= total_steps_;
  if (recorder_) recorder_->finish(complete, signal, state_.step);
  if (profiler_) {
    profiler_->collect(*stream_);
    if (mesh_.is_root()) std::fputs(profile_text(profiler_->rows(), profiled_steps_).c_str(), stdout);
  }
  return complete ? ExitCode::done : ExitCode::preempted;
}

std::string Trainer::description() const {
  std::string s = plan_text(config_, plan_);
  if (device_ == Device::cuda) {
    s += text("back end     cuda, ", pass_.dtype == DType::bf16 ? "bf16" : "fp32", "; ", device_properties(0).name,
              "\n");
  } else {
    const DeviceCount gpus = device_count();
    s += text("back end     cpu, fp32; ", cpu_gemm_description(),
              config_.train.device == TrainConfig::DeviceChoice::automatic ? "; no GPU: " + gpus.reason : "", "\n");
  }
  if (mesh_.world().size() > 1) s += text("ranks        ", mesh_.description(), "\n");
  s += text("data         ", train_data_->rows(), " training rows of ", config_.data.sequence_length, " tokens (",
            train_data_->tokens(), " tokens)");
  if (validation_data_) s += text(", ", validation_data_->rows(), " validation rows");
  s += text(
      "\nrun          ", total_steps_, " steps of ", config_.train.global_batch_size, " rows in micro-batches of ",
      config_.train.micro_batch_size, ", ",
      static_cast<double>(total_steps_ * config_.train.global_batch_size) / static_cast<double>(train_data_->rows()),
      " epochs\n");
  return s;
}

}  // namespace kestrel
