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

// The path of a model may be any bytes; what is not UTF-8 in it becomes U+FFFD.
void print_json(const nlohmann::ordered_json& j) {
  std::printf("%s\n", j.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

int64_t row_length(const Options& o, const InferenceModel& m) {
  if (o.sequence_length > 0) return o.sequence_length;
  if (m.run) return m.run->data.sequence_length;
  throw ConfigError(text(m.source, " does not say how long its rows are. Give --sequence-length."));
}

int evaluate_text(const Options& o, InferenceModel& m) {
  std::vector<std::string> files = o.data;
  if (files.empty() && m.run) files = m.run->data.validation;
  if (files.empty()) throw ConfigError(text(m.source, " names no validation shards. Give some with --data."));
  const int64_t T = row_length(o, m);
  const TokenDataset data(files, T, m.config.vocab_size, m.tokenizer ? m.tokenizer->fingerprint() : m.trained_with);

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
    print_json(j);
  } else {
    std::printf("loss %.5f nats, perplexity %.3f", loss, std::exp(loss));
    if (bytes > 0) std::printf(", %.4f bits per byte", sum / (std::numbers::ln2 * bytes));
    std::printf(" over %lld targets (%s)\n", static_cast<long long>(targets), m.source.c_str());
  }
  return 0;
}

int evaluate_choices(const Options& o, InferenceModel& m) {
  const std::vector<ChoiceQuestion> questions = read_choices(o.choices);
  check_lengths(questions, m.need_tokenizer(), row_length(o, m));
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
    print_json({{"model", m.source},
                {"questions", questions.size()},
                {"accuracy", static_cast<double>(right) / n},
                {"accuracy_per_byte", static_cast<double>(right_by_byte) / n}});
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
  add_integer(c, "--sequence-length", o->sequence_length,
              "Tokens of a row, or at most of a question with one choice (default: the run's)", 1, kMaxSize)
      ->default_str("");
  add_integer(c, "--batch", o->batch, "Rows at once", 1, kMaxSize);
  c.add_flag("--json", o->json, "Print JSON");
  c.callback([o, &exit_code] {
    InferenceModel m = load_model(o->model, o->tokenizer);
    exit_code = o->choices.empty() ? evaluate_text(*o, m) : evaluate_choices(*o, m);
  });
}

}  // namespace kestrel::tools
