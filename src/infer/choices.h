// Multiple-choice questions: the answer with the largest log-probability given the context.
#pragma once

#include <string>
#include <vector>

#include "src/data/tokenizer.h"
#include "src/model/model.h"

namespace kestrel {

struct ChoiceQuestion {
  std::string context;
  std::vector<std::string> choices;
  size_t answer = 0;
  std::string where;  // "questions.jsonl line 3"
};

// One JSON object per line: {"context": "...", "choices": ["...", ...], "answer": index}.  DataError names the line.
std::vector<ChoiceQuestion> read_choices(const std::string& path);

struct ChoiceScores {
  std::vector<double> log_probability;  // nats, summed over the choice's tokens
  std::vector<double> per_byte;
  size_t best() const;
  size_t best_per_byte() const;
};

// DataError, naming the line, when a question and one of its choices are more than `limit` tokens.
void check_lengths(const std::vector<ChoiceQuestion>& questions, const Tokenizer& tokenizer, int64_t limit);

// Each choice is scored as the continuation of the context (encoded apart, so the border is a token border).
ChoiceScores score_choices(Model& model, const Tokenizer& tokenizer, const ChoiceQuestion& question);

}  // namespace kestrel
