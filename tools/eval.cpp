// kestrel eval: loss, perplexity and bits per byte of a model on token shards, or its accuracy on multiple-choice
// questions.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>

#include "kernels/loss/loss.h"
#include "src/data/loader.h"
#include "src/infer/choices.h"
#include "src/infer/load_model.h"
#include "src/report/progress.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct Options {
  std::string model, choices;
  std::vector<std::string> data;
  std::optional<std::string> tokenizer;
  int64_t sequence_length = 0, batch = 8;
  bool json = false;
};

int evaluate_text(const Options& o, InferenceModel& m) {
  std::vector<std::string> files = o.data;
  if (files.empty() && m.run) files = m.run->data.validation;
  if (files.empty()) throw ConfigError(text(m.source, " names no validation shards. Give some with --data."));
  int64_t T = o.sequence_length;
  if (T == 0 && m.run) T = m.run->data.sequence_length;
  if (T == 0) throw ConfigError("the row length is not known: give --sequence-length.");
  const TokenDataset data(files, T, m.config.vocab_size, m.tokenizer ? m.tokenizer->fingerprint() : "");

  const int64_t B = std::min(o.batch, data.rows());
  std::vector<float> losses(static_cast<size_t>(B * T));
  const Tensor out = Tensor::of(losses.data(), {B * T});
  Batch b;
  const auto pass = [&](Stream& s) {
    const auto cut = [&](const std::vector<int32_t>& v) { return Tensor::of(v.data(), {B, T}); };
    m.model->evaluate(s, {cut(b.tokens), cut(b.targets), cut(b.segment)}, out, {});
  };
  read_rows(data, 0, B, b);
  Arena arena(Device::cpu, planned_bytes(Device::cpu, pass));
  Stream s(arena);
  double sum = 0, bytes = 0;
  int64_t targets = 0;
  Progress progress("eval", data.rows());
  for (int64_t row = 0; row < data.rows(); row += B) {
    read_rows(data, row, B, b);
    pass(s);
    for (float x : losses) sum += static_cast<double>(x);
    for (int32_t t : b.targets) {
      if (t == kIgnoreTarget) continue;
      ++targets;
      if (!data.token_bytes().empty()) bytes += data.token_bytes()[static_cast<size_t>(t)];
    }
    progress.update(std::min(row + B, data.rows()));
  }
  progress.finish();
  const double loss = sum / static_cast<double>(targets);
  if (!std::isfinite(loss))
    throw DivergedError(text("the loss of ", m.source, " over ", targets, " targets is ", loss,
                             ": the weights are too large to compute with. Use an earlier checkpoint."));
  nlohmann::ordered_json j{{"model", m.source}, {"targets", targets}, {"loss", loss}, {"perplexity", std::exp(loss)}};
  if (bytes > 0) j["bits_per_byte"] = sum / (std::numbers::ln2 * bytes);
  if (o.json) {
    std::printf("%s\n", j.dump(2).c_str());
  } else {
    std::printf("loss %.5f nats, perplexity %.3f", loss, std::exp(loss));
    if (bytes > 0) std::printf(", %.4f bits per byte", sum / (std::numbers::ln2 * bytes));
    std::printf(" over %lld targets (%s)\n", static_cast<long long>(targets), m.source.c_str());
  }
  return 0;
}

int evaluate_choices(const Options& o, InferenceModel& m) {
  const std::vector<ChoiceQuestion> questions = read_choices(o.choices);
  int64_t right = 0, right_by_byte = 0;
  Progress progress("eval", static_cast<int64_t>(questions.size()));
  for (size_t i = 0; i < questions.size(); ++i) {
    const ChoiceScores s = score_choices(*m.model, m.need_tokenizer(), questions[i]);
    right += s.best() == questions[i].answer;
    right_by_byte += s.best_per_byte() == questions[i].answer;
    progress.update(static_cast<int64_t>(i + 1));
  }
  progress.finish();
  const double n = static_cast<double>(questions.size());
  if (o.json) {
    std::printf("%s\n", nlohmann::ordered_json{{"model", m.source},
                                               {"questions", questions.size()},
                                               {"accuracy", static_cast<double>(right) / n},
                                               {"accuracy_per_byte", static_cast<double>(right_by_byte) / n}}
                            .dump(2)
                            .c_str());
  } else {
    std::printf("accuracy %.4f, per byte %.4f over %zu questions (%s)\n", static_cast<double>(right) / n,
                static_cast<double>(right_by_byte) / n, questions.size(), m.source.c_str());
  }
  return 0;
}

}  // namespace

void add_eval_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "eval",
                            "Loss, perplexity and bits per byte on token shards; accuracy on multiple-choice questions",
                            "kestrel eval runs/quickstart\nkestrel eval runs/quickstart --choices questions.jsonl");
  c.add_option("model", o->model,
               "Run directory, checkpoint folder, or directory with model.safetensors and config.json")
      ->required();
  CLI::Option* data = c.add_option("--data", o->data, "Token shards or globs (default: the run's validation shards)");
  c.add_option("--choices", o->choices, R"(JSONL of {"context": ..., "choices": [...], "answer": index})")
      ->excludes(data);
  c.add_option("--tokenizer", o->tokenizer, "tokenizer.json (default: the one the run was trained with)");
  c.add_option("--sequence-length", o->sequence_length, "Tokens of a row (default: the run's)")
      ->check(CLI::PositiveNumber);
  c.add_option("--batch", o->batch, "Rows at once")->check(CLI::PositiveNumber)->capture_default_str();
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] {
    InferenceModel m = load_model(o->model, o->tokenizer);
    exit_code = o->choices.empty() ? evaluate_text(*o, m) : evaluate_choices(*o, m);
  });
}

}  // namespace kestrel::tools
