// kestrel generate: text from a trained model, streamed as it comes.
#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>

#include "src/infer/decoder.h"
#include "src/infer/load_model.h"
#include "src/infer/sampler.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct Options {
  std::string model, prompt;
  ComputeChoice where;
  std::optional<std::string> tokenizer;
  int64_t max_tokens = 128;
  Sampling sampling;
  bool from_stdin = false, ignore_eos = false;
};

int run(const Options& o) {
  check_sampling(o.sampling);
  const Device device = o.where.chosen_device();
  const InferenceModel m = load_model(o.model, o.tokenizer, device, o.where.dtype());
  const Tokenizer& tokenizer = m.need_tokenizer();
  std::string prompt = o.prompt;
  if (o.from_stdin) prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  std::vector<int32_t> ids = tokenizer.encode(prompt);
  const auto end = tokenizer.id_of(kEndOfText);
  // Documents end with the end-of-text token, so a document starts after one.
  if (ids.empty()) {
    if (!end)
      throw ConfigError(
          "the prompt is empty and the tokenizer has no <|endoftext|> to start from. Give --prompt TEXT.");
    ids.push_back(*end);
  }
  Decoder decoder(*m.model, static_cast<int64_t>(ids.size()) + o.max_tokens);
  std::fwrite(prompt.data(), 1, prompt.size(), stdout);
  const auto start = std::chrono::steady_clock::now();
  auto logits = decoder.feed(ids);
  int64_t made = 0;
  // Only ids of the tokenizer can be printed; a model's vocabulary may be padded beyond it.
  const size_t printable = static_cast<size_t>(tokenizer.vocab_size());
  while (made < o.max_tokens) {
    const int32_t id = choose_token(logits.first(printable), o.sampling, decoder.length());
    ++made;
    if (end && id == *end && !o.ignore_eos) break;
    const std::string piece = tokenizer.decode(std::span(&id, 1));
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
    if (made < o.max_tokens) logits = decoder.feed(std::span(&id, 1));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fputs("\n", stdout);
  std::fflush(stdout);
  std::fprintf(stderr, "%lld tokens in %.2f s (%.1f tokens/s, prompt of %zu included) from %s on %s in %s\n",
               static_cast<long long>(made), seconds,
               static_cast<double>(made + static_cast<int64_t>(ids.size())) / seconds, ids.size(), m.source.c_str(),
               name_of(device), o.where.precision.c_str());
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(
      app, "generate", "Continue a text with a trained model",
      "kestrel generate runs/quickstart --prompt \"In the beginning\" --max-tokens 64 --temperature 0.8 --top-k 50");
  c.add_option("model", o->model,
               "Run directory, checkpoint folder, or directory with model.safetensors and config.json")
      ->required();
  CLI::Option* prompt = c.add_option("--prompt", o->prompt, "Text to continue (empty: start a document)");
  c.add_flag("--stdin", o->from_stdin, "Read the prompt from standard input")->excludes(prompt);
  c.add_option("--tokenizer", o->tokenizer, "tokenizer.json (default: the one the run was trained with)");
  add_integer(c, "--max-tokens", o->max_tokens, "Tokens to generate at most", 1, kMaxSize);
  add_number(c, "--temperature", o->sampling.temperature, "0 is greedy", "a number, 0 (greedy) or more",
             [](double x) { return x >= 0; });
  add_integer(c, "--top-k", o->sampling.top_k, "Keep the k likeliest tokens (0: all)", 0, kMaxSize);
  add_number(c, "--top-p", o->sampling.top_p, "Keep the likeliest tokens up to this probability", "a number in (0, 1]",
             [](double x) { return x > 0 && x <= 1; });
  add_integer(c, "--seed", o->sampling.seed, "Seed of the draws", 0, UINT64_MAX);
  add_compute_choice(c, o->where);
  c.add_flag("--ignore-eos", o->ignore_eos, "Go on after the end-of-text token");
  c.callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace kestrel::tools
