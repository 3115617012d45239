#include "src/infer/choices.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include "kernels/loss/loss.h"
#include "src/checkpoint/json_strict.h"

namespace kestrel {
namespace {

size_t largest(const std::vector<double>& v) {
  return static_cast<size_t>(std::max_element(v.begin(), v.end()) - v.begin());
}

}  // namespace

size_t ChoiceScores::best() const {
  return largest(log_probability);
}
size_t ChoiceScores::best_per_byte() const {
  return largest(per_byte);
}

std::vector<ChoiceQuestion> read_choices(const std::string& path) {
  std::ifstream in(path);
  if (!in) {
    throw DataError(
        text("cannot open ", path, ": ", std::strerror(errno), ". Check its name and that it may be read."));
  }
  std::vector<ChoiceQuestion> out;
  std::string line;
  for (int64_t n = 1; std::getline(in, line); ++n) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = text(path, " line ", n);
    const auto j = parse_json_strict(line, where);
    ChoiceQuestion q;
    nlohmann::json answer;
    try {
      q.context = j.at("context");
      q.choices = j.at("choices").get<std::vector<std::string>>();
      answer = j.at("answer");
    } catch (const nlohmann::json::exception& e) {
      throw DataError(
          text(where, R"(: expected {"context": text, "choices": [text, ...], "answer": index}: )", e.what()));
    }
    // A negative number is not an unsigned one.
    if (q.choices.size() < 2 || !answer.is_number_unsigned() || answer.get<uint64_t>() >= q.choices.size()) {
      throw DataError(
          text(where, ": answer ", answer.dump(), " of ", q.choices.size(),
               " choices; there must be at least two, and the answer is a whole number that counts from 0"));
    }
    q.answer = answer.get<size_t>();
    if (std::any_of(q.choices.begin(), q.choices.end(), [](const std::string& c) { return c.empty(); }))
      throw DataError(text(where, ": an empty choice. Each choice needs text to be scored."));
    q.where = where;
    out.push_back(std::move(q));
  }
  if (out.empty()) {
    throw DataError(text(path,
                         R"( holds no questions. Write one a line: {"context": "...", "choices": ["...", "..."], )",
                         R"("answer": 0}.)"));
  }
  return out;
}

void check_lengths(const std::vector<ChoiceQuestion>& questions, const Tokenizer& tokenizer, int64_t limit) {
  for (const ChoiceQuestion& q : questions) {
    const size_t context = tokenizer.encode(q.context).size();
    for (const std::string& choice : q.choices) {
      const auto tokens = static_cast<int64_t>(context + tokenizer.encode(choice).size());
      if (tokens <= limit) continue;
      throw DataError(text(q.where, ": the context and a choice are ", tokens, " tokens, the limit is ", limit,
                           ". Shorten the context, or raise the limit with --sequence-length."));
    }
  }
}

ChoiceScores score_choices(Model& model, const Tokenizer& tokenizer, const ChoiceQuestion& q) {
  std::vector<int32_t> context = tokenizer.encode(q.context);
  if (context.empty()) {
    const auto end = tokenizer.id_of(kEndOfText);
    if (!end) throw DataError("a question has an empty context and the tokenizer has no <|endoftext|> to start from");
    context.push_back(*end);
  }
  ChoiceScores scores;
  for (const std::string& choice : q.choices) {
    std::vector<int32_t> ids = context;
    const std::vector<int32_t> continuation = tokenizer.encode(choice);
    ids.insert(ids.end(), continuation.begin(), continuation.end());
    const int64_t T = static_cast<int64_t>(ids.size()) - 1;
    std::vector<int32_t> targets(ids.begin() + 1, ids.end());
    std::fill_n(targets.begin(), context.size() - 1, kIgnoreTarget);
    std::vector<float> losses(static_cast<size_t>(T));
    const MicroBatch batch{Tensor::of(ids.data(), {1, T}), Tensor::of(targets.data(), {1, T}), {}};
    const auto run = [&](Stream& s) { model.evaluate(s, batch, Tensor::of(losses.data(), {T}), {}); };
    Arena arena(Device::cpu, planned_bytes(Device::cpu, run));
    Stream s(arena);
    run(s);
    double sum = 0;
    for (float x : losses) sum -= static_cast<double>(x);
    if (!std::isfinite(sum))
      throw DivergedError(text("the log-probability of the choice \"", choice, "\" is ", sum,
                               ": the weights are too large to compute with. Use an earlier checkpoint."));
    scores.log_probability.push_back(sum);
    scores.per_byte.push_back(sum / static_cast<double>(choice.size()));
  }
  return scores;
}

}  // namespace kestrel
