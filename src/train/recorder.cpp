#include "src/train/recorder.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "src/checkpoint/files.h"
#include "src/report/html.h"

namespace kestrel {
namespace {

std::string format(const char* pattern, double value) {
  char out[48];
  std::snprintf(out, sizeof out, pattern, value);
  return out;
}

}  // namespace

Recorder::Recorder(const RunConfig& config, int64_t resumed_step, int64_t total_steps)
    : config_(config),
      total_(total_steps),
      log_(LogOptions{true, config.log.dir + "/log.txt"}),
      metrics_(config.log.dir + "/metrics.jsonl", resumed_step),
      progress_("train", total_steps, resumed_step) {
  write_file(config.log.dir + "/config.json", to_portable_json(config));
  if (config.log.tensorboard)
    tensorboard_ = std::make_unique<TensorBoardWriter>(config.log.dir + "/tensorboard", resumed_step);
}

void Recorder::start(const std::string& description, const std::vector<std::string>& warnings,
                     const std::string& resumed_from, const std::vector<std::string>& changes) {
  log_.info("Kestrel: run directory ", config_.log.dir, "\n", description);
  for (const std::string& w : warnings) log_.warn(w);
  if (!resumed_from.empty()) log_.info("resuming from ", resumed_from);
  for (const std::string& c : changes) log_.info("changed since it was saved: ", c);
}

void Recorder::step(const StepRecord& r) {
  if (!any_step_) first_loss_ = r.loss;
  any_step_ = true;
  last_loss_ = r.loss;
  std::string note = "loss " + format("%.4f", r.loss) + " | lr " + format("%.2e", r.lr) + " | grad norm " +
                     format("%.3f", r.grad_norm);
  if (!r.violation.empty()) note += " | max violation " + format("%.2f", r.max_violation);
  note += " | " + count_text(r.tokens_per_s) + " tokens/s" + last_eval_;
  progress_.update(r.step, note);
  if (r.skipped)
    log_.warn("step ", r.step, ": loss ", r.loss, ", gradient norm ", r.grad_norm, ": the update was not applied");
  if (r.step % config_.log.every != 0 && r.step != total_ && !r.skipped) return;

  MetricLine line{{"step", r.step},
                  {"tokens", r.tokens},
                  {"loss", r.loss},
                  {"lr", r.lr},
                  {"grad_norm", r.grad_norm},
                  {"step_ms", r.step_ms},
                  {"tokens_per_s", r.tokens_per_s}};
  if (!r.violation.empty()) {
    line.emplace_back("max_violation", r.max_violation);
    line.emplace_back("balance", r.violation);
  }
  if (config_.model.balancing.method == BalancingConfig::Method::aux_loss)
    line.emplace_back("aux_loss", r.auxiliary_loss);
  if (config_.optimizer.qk_clip) line.emplace_back("clipped_heads", r.clipped_heads);
  line.emplace_back("skipped", r.skipped);
  metrics_.write(line);
  if (tensorboard_) {
    tensorboard_->write(r.step, {{"train/loss", r.loss},
                                 {"train/lr", r.lr},
                                 {"train/grad_norm", r.grad_norm},
                                 {"train/tokens_per_s", r.tokens_per_s},
                                 {"train/max_violation", r.max_violation}});
  }
}

void Recorder::evaluation(const EvalRecord& r) {
  MetricLine line{{"step", r.step}, {"val_loss", r.loss}};
  last_eval_ = " | val " + format("%.4f", r.loss);
  if (r.bits_per_byte > 0) {
    line.emplace_back("val_bits_per_byte", r.bits_per_byte);
    last_eval_ += " (" + format("%.3f", r.bits_per_byte) + " bits/byte)";
  }
  line.emplace_back("val_targets", r.targets);
  metrics_.write(line);
  if (tensorboard_)
    tensorboard_->write(r.step, {{"validation/loss", r.loss}, {"validation/bits_per_byte", r.bits_per_byte}});
  if (std::isfinite(r.loss)) {
    log_.info("step ", r.step, last_eval_.substr(2));
  } else {
    log_.warn("step ", r.step, ": the validation loss is ", r.loss);
  }
}

void Recorder::checkpoint(int64_t step, const std::string& dir) {
  log_.info("step ", step, ": checkpoint in ", dir);
}

void Recorder::finish(bool complete, int signal, int64_t step) {
  progress_.finish();
  if (!complete) {
    log_.info("stopped by signal ", signal, " (", strsignal(signal), ") after step ", step, " of ", total_,
              "; saved. Start the same command again to go on.");
    return;
  }
  if (!any_step_)
    log_.info("the run was complete already: step ", step, " of ", total_, ". Raise train.steps to go on.");
  if (any_step_)
    log_.info("done: loss ", format("%.4f", first_loss_), " -> ", format("%.4f", last_loss_), " over ", total_,
              " steps", last_eval_);
  write_report(config_.log.dir);
  log_.info("report: ", config_.log.dir, "/report.html");
}

}  // namespace kestrel
