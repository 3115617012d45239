// Rows of every section but `model`.
#include "src/config/fields.h"

namespace kestrel {
namespace {

void add_data(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "data.train", "Training shards: files or globs, in this order.",
      [](auto& d) -> auto& { return d.config.data.train; });
  add(
      "data.validation", "Validation shards: files or globs.",
      [](auto& d) -> auto& { return d.config.data.validation; });
  add(
      "data.tokenizer", "Path of tokenizer.json, for bytes and text in evaluation and generation.",
      [](auto& d) -> auto& { return d.config.data.tokenizer; })
      .null_is("no tokenizer");
  add(
      "data.sequence_length", "Tokens T of a row; a row is a window of T + 1 tokens, at stride T.",
      [](auto& d) -> auto& { return d.config.data.sequence_length; })
      .count(1)
      .required("2048");
  add(
      "data.shuffle", "Whether rows come in random order; false: in file order.",
      [](auto& d) -> auto& { return d.config.data.shuffle; });
  add(
      "data.seed", "Seed of the order of rows.", [](auto& d) -> auto& { return d.config.data.seed; })
      .between(0, Field::kMaxWhole)
      .note("Above 2^53 it must be written with all its digits.");
}

void add_train(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "train.steps", "Optimizer steps of the whole run.", [](auto& d) -> auto& { return d.config.train.steps; })
      .count(1)
      .null_is("as train.tokens says")
      .default_is("one of train.steps and train.tokens is required");
  add(
      "train.tokens", "Tokens of the whole run; the last step is a full one.",
      [](auto& d) -> auto& { return d.config.train.tokens; })
      .between(1, Field::kMaxExact)
      .null_is("as train.steps says")
      .default_is("one of train.steps and train.tokens is required");
  add(
      "train.global_batch_size", "Rows of one optimizer step, over all ranks.",
      [](auto& d) -> auto& { return d.config.train.global_batch_size; })
      .count(1)
      .required("64");
  add(
      "train.micro_batch_size",
      "Rows of one forward and backward on one rank: memory, not results. It divides global_batch_size.",
      [](auto& d) -> auto& { return d.config.train.micro_batch_size; })
      .count(1);
  add(
      "train.seed", "Seed of the initial weights.", [](auto& d) -> auto& { return d.config.train.seed; })
      .between(0, Field::kMaxWhole)
      .note("Above 2^53 it must be written with all its digits.");
  add(
      "train.device", "Where to train; `auto` takes a GPU where there is one.",
      [](auto& d) -> auto& { return d.config.train.device; });
  add(
      "train.precision", "Weights and activations in memory on a GPU; a CPU computes in fp32.",
      [](auto& d) -> auto& { return d.config.train.precision; });
  add(
      "train.init_from", "Directory with model.safetensors (or an index) in K3's names to start from.",
      [](auto& d) -> auto& { return d.config.train.init_from; })
      .null_is("random weights");
  add(
      "train.recompute",
      "Activations computed again in the backward pass instead of kept: none, those that need no matrix product, or "
      "all of a block of layers.",
      [](auto& d) -> auto& { return d.config.train.recompute; });
}

void add_optimizer(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "optimizer.type", "`muon`: matrices by Muon, the rest by AdamW; `adamw`: everything by AdamW.",
      [](auto& d) -> auto& { return d.config.optimizer.type; });
  add(
      "optimizer.per_head", "Muon: whether q, k and v projections are orthogonalised head by head (K3).",
      [](auto& d) -> auto& { return d.config.optimizer.per_head; });
  add(
      "optimizer.weight_decay",
      "Decoupled weight decay, times the learning rate; not on norms, gates' biases and "
      "AttnRes queries.",
      [](auto& d) -> auto& { return d.config.optimizer.weight_decay; })
      .between(0, 10);
  add(
      "optimizer.grad_clip", "Bound on the global L2 norm of the gradient.",
      [](auto& d) -> auto& { return d.config.optimizer.grad_clip; })
      .above(0)
      .null_is("no clipping");
  add(
      "optimizer.momentum", "Muon: momentum.", [](auto& d) -> auto& { return d.config.optimizer.momentum; })
      .between(0, 1)
      .below(1);
  add(
      "optimizer.nesterov", "Muon: whether the update looks ahead by one momentum step.",
      [](auto& d) -> auto& { return d.config.optimizer.nesterov; });
  add(
      "optimizer.newton_schulz_steps", "Muon: iterations of the orthogonalisation.",
      [](auto& d) -> auto& { return d.config.optimizer.newton_schulz_steps; })
      .between(1, 20);
  add(
      "optimizer.muon_lr_scale", "Muon: the update is this times sqrt(max(rows, columns)) times the orthogonal factor.",
      [](auto& d) -> auto& { return d.config.optimizer.muon_lr_scale; })
      .above(0);
  add(
      "optimizer.beta1", "AdamW: decay of the first moment.", [](auto& d) -> auto& { return d.config.optimizer.beta1; })
      .between(0, 1)
      .below(1);
  add(
      "optimizer.beta2", "AdamW: decay of the second moment.",
      [](auto& d) -> auto& { return d.config.optimizer.beta2; })
      .between(0, 1)
      .below(1);
  add(
      "optimizer.eps", "AdamW: added to the root of the second moment.",
      [](auto& d) -> auto& { return d.config.optimizer.eps; })
      .above(0);
  add(
      "optimizer.qk_clip",
      "tau: after a step in which a head's largest attention logit exceeded it, the head's MLA query and key rows "
      "shrink "
      "(100 in Kimi K2).",
      [](auto& d) -> auto& { return d.config.optimizer.qk_clip; })
      .above(0)
      .null_is("off");
}

void add_schedule(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "schedule.kind", "After warm-up: a cosine down to min_lr; peak_lr, then a line down to min_lr; or peak_lr.",
      [](auto& d) -> auto& { return d.config.schedule.kind; });
  add(
      "schedule.peak_lr", "Learning rate after warm-up.", [](auto& d) -> auto& { return d.config.schedule.peak_lr; })
      .above(0)
      .between(0, 10)
      .required("1e-3");
  add(
      "schedule.min_lr", "Learning rate of the last step (`cosine`, `wsd`).",
      [](auto& d) -> auto& { return d.config.schedule.min_lr; })
      .between(0, 10);
  add(
      "schedule.warmup_steps", "Steps of linear warm-up; step s of them has peak_lr * s / warmup_steps.",
      [](auto& d) -> auto& { return d.config.schedule.warmup_steps; })
      .count(0);
  add(
      "schedule.decay_steps", "`wsd`: steps of the final decay.",
      [](auto& d) -> auto& { return d.config.schedule.decay_steps; })
      .count(0)
      .default_is("required with `wsd`, else 0");
}

void add_parallel(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "parallel.expert", "Ranks that share one set of experts; it divides the number of ranks and `model.num_experts`.",
      [](auto& d) -> auto& { return d.config.parallel.expert; })
      .count(1);
  add(
      "parallel.context", "Ranks that share one row.", [](auto& d) -> auto& { return d.config.parallel.context; })
      .between(1, 1)
      .note("Context parallelism does not exist yet; set 1, and a smaller train.micro_batch_size to save memory.");
  add(
      "parallel.pipeline", "Ranks that share the layers.", [](auto& d) -> auto& { return d.config.parallel.pipeline; })
      .between(1, 1)
      .note("Pipeline parallelism does not exist yet; set 1, and train.recompute to save memory.");
  add(
      "parallel.zero_stage", "1: each rank keeps the optimizer state of its share of the parameters.",
      [](auto& d) -> auto& { return d.config.parallel.zero_stage; })
      .between(1, 1)
      .note("Optimizer state is always sharded over the ranks, gradients and weights are not; set 1.");
}

void add_outputs(std::vector<Field>& t) {
  const auto add = [&](auto... args) -> Field& { return t.emplace_back(make_field(args...)); };
  add(
      "checkpoint.dir", "Where checkpoints go.", [](auto& d) -> auto& { return d.config.checkpoint.dir; })
      .default_is("<log.dir>/checkpoints");
  add(
      "checkpoint.every", "Steps between checkpoints; 0: only at the end and on a stop signal.",
      [](auto& d) -> auto& { return d.config.checkpoint.every; })
      .count(0);
  add(
      "checkpoint.keep", "Newest checkpoints kept; 0: all.", [](auto& d) -> auto& { return d.config.checkpoint.keep; })
      .count(0);
  add(
      "checkpoint.keep_every", "Checkpoints of steps that are multiples of this are never deleted; 0: none.",
      [](auto& d) -> auto& { return d.config.checkpoint.keep_every; })
      .count(0);
  add(
      "checkpoint.resume",
      "`auto`: from the newest checkpoint that verifies, from the start where there are none; `never`: from the start; "
      "`must`: from a checkpoint or not at all.",
      [](auto& d) -> auto& { return d.config.checkpoint.resume; });
  add(
      "eval.every", "Steps between evaluations; 0: never.", [](auto& d) -> auto& { return d.config.eval.every; })
      .count(0);
  add(
      "eval.batches",
      "Validation batches of train.micro_batch_size rows, over all ranks together; 0: the whole validation set.",
      [](auto& d) -> auto& { return d.config.eval.batches; })
      .count(0);
  add(
      "log.dir", "The run directory: config.json, metrics.jsonl, log.txt.",
      [](auto& d) -> auto& { return d.config.log.dir; })
      .default_is("runs/<name of the run file>");
  add(
      "log.every", "Steps between lines of metrics.jsonl.", [](auto& d) -> auto& { return d.config.log.every; })
      .count(1);
  add(
      "log.tensorboard", "Whether to write TensorBoard event files as well.",
      [](auto& d) -> auto& { return d.config.log.tensorboard; });
}

}  // namespace

std::vector<Field> run_fields() {
  std::vector<Field> t;
  add_data(t);
  add_train(t);
  add_optimizer(t);
  add_schedule(t);
  add_parallel(t);
  add_outputs(t);
  return t;
}

}  // namespace kestrel
