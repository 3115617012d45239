// kestrel tokenizer train | encode | decode
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>

#include "kernels/core/error.h"
#include "src/checkpoint/files.h"
#include "src/data/bpe_train.h"
#include "src/data/documents.h"
#include "src/data/files.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct TrainOptions {
  std::vector<std::string> inputs;
  std::string out;
  std::string pattern = "cl100k";
  std::string split = "file";
  InputOptions input;
  std::vector<std::string> specials;
  BpeOptions bpe;
  bool force = false;
};

int run_train(TrainOptions o) {
  refuse_to_overwrite(o.out, expand_globs(o.inputs));
  if (std::filesystem::exists(o.out) && !o.force) {
    throw DataError(text(o.out, " exists. Choose another name, or replace it with --force."));
  }
  o.bpe.pattern = *pattern_from_name(o.pattern);
  o.input.split = *document_split_from(o.split);
  o.bpe.specials.insert(o.bpe.specials.end(), o.specials.begin(), o.specials.end());
  BpeTrainer trainer(o.bpe);
  DocumentReader reader(o.inputs, o.input);
  std::vector<std::string> documents;
  int64_t bytes = 0;
  while (reader.next_batch(documents, int64_t{16} << 20)) {
    trainer.add(documents);
    for (const auto& d : documents) bytes += static_cast<int64_t>(d.size());
  }
  const Tokenizer tokenizer = trainer.train();
  tokenizer.save(o.out);
  std::printf("%s: %lld tokens (pattern %s) from %.1f MB of text, %lld distinct pieces; fingerprint %s\n",
              o.out.c_str(), static_cast<long long>(tokenizer.vocab_size()), o.pattern.c_str(),
              static_cast<double>(bytes) * 1e-6, static_cast<long long>(trainer.distinct_pieces()),
              tokenizer.fingerprint().c_str());
  if (tokenizer.vocab_size() < o.bpe.vocab_size) {
    std::printf(
        "The text has no more pairs that occur %lld times, so the vocabulary is smaller than the %lld asked for.\n",
        static_cast<long long>(o.bpe.min_count), static_cast<long long>(o.bpe.vocab_size));
  }
  return static_cast<int>(ExitCode::done);
}

void add_train(CLI::App& parent, int& exit_code) {
  auto o = std::make_shared<TrainOptions>();
  CLI::App& c = add_command(parent, "train", "Learn a byte-level BPE vocabulary from text",
                            "kestrel tokenizer train --vocab-size 8192 --out tokenizer.json kjv.txt");
  c.add_option("inputs", o->inputs, "Text: .txt, .md, .jsonl, or their .gz; patterns such as 'data/*.txt'")->required();
  add_integer(c, "--vocab-size", o->bpe.vocab_size, "Tokens, special ones included", 257, kMaxVocabSize);
  c.add_option("--out", o->out, "File to write (Hugging Face's tokenizer.json)")->required();
  c.add_option("--pattern", o->pattern, "How text is cut into pieces")
      ->check(CLI::IsMember({"cl100k", "gpt2"}))
      ->capture_default_str();
  c.add_option("--special", o->specials, "A special token besides <|endoftext|> (may be repeated)")
      ->allow_extra_args(false);
  add_integer(c, "--min-count", o->bpe.min_count, "A pair merges only if it occurs so often", 1, INT64_MAX);
  c.add_option("--split-documents", o->split, "What a document of plain text is")
      ->check(CLI::IsMember({"file", "blank-line", "line"}))
      ->capture_default_str();
  c.add_option("--key", o->input.json_key, "Where JSON lines have their text")->capture_default_str();
  c.add_flag("--force", o->force, "Replace the output file");
  c.callback([o, &exit_code] { exit_code = run_train(*o); });
}

struct CodeOptions {
  std::string tokenizer, input = "-", output = "-";
  bool allow_special = false;
};

std::string read_input(const std::string& path) {
  if (path != "-") return read_file(path);
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

void write_output(const std::string& path, const std::string& content) {
  if (path != "-") return write_file(path, content);
  const bool written = std::fwrite(content.data(), 1, content.size(), stdout) == content.size();
  if (std::fflush(stdout) != 0 || !written) throw DataError("cannot write to standard output");
}

void refuse_to_overwrite(const CodeOptions& o) {
  if (o.output != "-") kestrel::refuse_to_overwrite(o.output, {o.input, o.tokenizer});
}

int run_encode(const CodeOptions& o) {
  refuse_to_overwrite(o);
  const Tokenizer t = Tokenizer::load(o.tokenizer);
  std::string out;
  for (int32_t id : t.encode(read_input(o.input), o.allow_special ? Specials::allow : Specials::as_text)) {
    out += (out.empty() ? "" : " ") + std::to_string(id);
  }
  write_output(o.output, out + "\n");
  return static_cast<int>(ExitCode::done);
}

std::vector<int32_t> parse_ids(const std::string& s) {
  std::vector<int32_t> ids;
  const char* p = s.data();
  const char* const end = p + s.size();
  for (;;) {
    while (p < end && (std::isspace(static_cast<unsigned char>(*p)) || *p == ',')) ++p;
    if (p == end) return ids;
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(p, end, id);
    const bool delimited = stop == end || std::isspace(static_cast<unsigned char>(*stop)) || *stop == ',';
    if (error != std::errc() || !delimited) {
      throw DataError(text("number ", ids.size() + 1, " of the input, \"", std::string(p, std::min(p + 20, end)),
                           "\", is not a token id. Decode reads ids separated by spaces, as encode prints them."));
    }
    ids.push_back(id);
    p = stop;
  }
}

int run_decode(const CodeOptions& o) {
  refuse_to_overwrite(o);
  const Tokenizer t = Tokenizer::load(o.tokenizer);
  write_output(o.output, t.decode(parse_ids(read_input(o.input))));
  return static_cast<int>(ExitCode::done);
}

CLI::App& add_code_command(CLI::App& parent, const std::string& name, const std::string& description,
                           const std::string& example, const std::shared_ptr<CodeOptions>& o) {
  CLI::App& c = add_command(parent, name, description, example);
  c.add_option("input", o->input, "File, or - for standard input")->capture_default_str();
  c.add_option("--tokenizer", o->tokenizer, "tokenizer.json")->required();
  c.add_option("--out", o->output, "File, or - for standard output")->capture_default_str();
  return c;
}

}  // namespace

void add_tokenizer_command(CLI::App& app, int& exit_code) {
  CLI::App& command = add_command(app, "tokenizer", "Train a tokenizer; encode and decode text",
                                  "kestrel tokenizer train --vocab-size 8192 --out tokenizer.json kjv.txt\n"
                                  "echo 'In the beginning' | kestrel tokenizer encode --tokenizer tokenizer.json");
  command.require_subcommand(1);
  add_train(command, exit_code);
  auto encode = std::make_shared<CodeOptions>();
  CLI::App& e =
      add_code_command(command, "encode", "Text to token ids",
                       "echo 'In the beginning' | kestrel tokenizer encode --tokenizer tokenizer.json", encode);
  e.add_flag("--allow-special", encode->allow_special, "Special tokens written in the text become their ids");
  e.callback([encode, &exit_code] { exit_code = run_encode(*encode); });
  auto decode = std::make_shared<CodeOptions>();
  CLI::App& d = add_code_command(command, "decode", "Token ids to text",
                                 "echo '72 105' | kestrel tokenizer decode --tokenizer tokenizer.json", decode);
  d.callback([decode, &exit_code] { exit_code = run_decode(*decode); });
}

}  // namespace kestrel::tools
