// kestrel data build | inspect
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>

#include "kernels/core/error.h"
#include "src/data/build.h"
#include "src/data/files.h"
#include "src/data/shard.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

using Clock = std::chrono::steady_clock;

struct BuildCommand {
  std::vector<std::string> inputs;
  std::string tokenizer;
  std::string split = "file";
  BuildOptions build;
};

// One line a second on standard error: rewritten in place on a terminal, once in ten seconds in a log.
class ProgressLine {
 public:
  void show(const BuildProgress& p) {
    const auto now = Clock::now();
    if (now - last_ < (terminal_ ? std::chrono::seconds(1) : std::chrono::seconds(10))) return;
    last_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const double percent =
        p.bytes_total > 0 ? 100. * static_cast<double>(p.bytes_done) / static_cast<double>(p.bytes_total) : 0;
    std::fprintf(stderr, "%s%5.1f %%  %lld documents  %.1f M tokens  %.2f M tokens/s%s", terminal_ ? "\r" : "", percent,
                 static_cast<long long>(p.documents), static_cast<double>(p.tokens) * 1e-6,
                 static_cast<double>(p.tokens) * 1e-6 / seconds, terminal_ ? "" : "\n");
    shown_ = true;
  }
  void close() const {
    if (terminal_ && shown_) std::fputc('\n', stderr);
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0, shown_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

void print_split(const char* name, const SplitReport& r) {
  if (r.documents == 0) return;
  std::printf("%-10s %lld documents, %lld tokens, %lld bytes of text (%.3f bytes per token), %zu shard%s from %s\n",
              name, static_cast<long long>(r.documents), static_cast<long long>(r.tokens),
              static_cast<long long>(r.bytes), static_cast<double>(r.bytes) / static_cast<double>(r.tokens),
              r.files.size(), r.files.size() == 1 ? "" : "s", r.files.front().c_str());
}

int run_build(BuildCommand o) {
  o.build.input.split = *document_split_from(o.split);
  refuse_to_overwrite(o.build.validation_text, expand_globs(o.inputs));
  refuse_to_overwrite(o.build.validation_text, {o.tokenizer});
  const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);
  ProgressLine line;
  const BuildReport report = build_dataset(tokenizer, o.inputs, o.build, [&](const BuildProgress& p) { line.show(p); });
  line.close();
  print_split("train", report.train);
  print_split("validation", report.validation);
  if (report.empty_documents > 0) {
    std::printf("%-10s %lld documents without text\n", "left out", static_cast<long long>(report.empty_documents));
  }
  return static_cast<int>(ExitCode::done);
}

void add_build(CLI::App& parent, int& exit_code) {
  auto o = std::make_shared<BuildCommand>();
  CLI::App& c = add_command(parent, "build", "Encode text into token shards",
                            "kestrel data build --tokenizer tokenizer.json --out data/kjv --validation-fraction 0.05 "
                            "--split-documents blank-line kjv.txt");
  c.add_option("inputs", o->inputs, "Text: .txt, .md, .jsonl, or their .gz; patterns such as 'data/*.jsonl.gz'")
      ->required();
  c.add_option("--tokenizer", o->tokenizer, "tokenizer.json")->required();
  c.add_option("--out", o->build.out, "Folder for train-*.safetensors and validation-*.safetensors")->required();
  add_number(c, "--validation-fraction", o->build.validation_fraction, "Share of the documents to hold out, in [0, 1)",
             "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; });
  add_integer(c, "--shard-tokens", o->build.shard_tokens, "Tokens of a full shard", 1024, INT64_MAX);
  c.add_option("--split-documents", o->split, "What a document of plain text is")
      ->check(CLI::IsMember({"file", "blank-line", "line"}))
      ->capture_default_str();
  c.add_option("--key", o->build.input.json_key, "Where JSON lines have their text")->capture_default_str();
  c.add_option("--eos", o->build.eos, "Special token that ends each document")->capture_default_str();
  add_integer(c, "--seed", o->build.seed, "Which documents are held out", 0, UINT64_MAX);
  c.add_option("--write-validation-text", o->build.validation_text, "Write the held-out text to this file, too");
  c.add_flag("--force", o->build.force, "Replace the shards in the folder");
  c.callback([o, &exit_code] { exit_code = run_build(*o); });
}

struct InspectCommand {
  std::vector<std::string> files;
  std::string tokenizer;
  int64_t show = 64;
};

std::string number_or_unknown(int64_t n) {
  return n < 0 ? "not recorded" : std::to_string(n);
}

void print_first(const Shard& s, const Tokenizer* tokenizer, int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(std::min(count, s.size())));
  s.read(0, static_cast<int64_t>(ids.size()), ids.data());
  std::printf("  first tokens   ");
  for (int32_t id : ids) std::printf(" %d", id);
  std::printf("\n");
  if (tokenizer) std::printf("  as text         %s\n", tokenizer->decode(ids).c_str());
}

void inspect(const std::string& file, const Tokenizer* tokenizer, int64_t show) {
  const Shard s(file);
  const Shard::Scan scan = s.scan();
  std::printf("%s\n", file.c_str());
  std::printf("  format          %s, %s\n", std::string(name_of(s.format())).c_str(),
              std::string(name_of(s.dtype())).c_str());
  std::printf("  tokens          %lld\n", static_cast<long long>(s.size()));
  std::printf("  vocab_size      %s (largest id %lld, at token %lld)\n", number_or_unknown(s.vocab_size()).c_str(),
              static_cast<long long>(scan.max_id), static_cast<long long>(scan.max_position));
  std::printf("  eos_id          %s\n", number_or_unknown(s.eos_id()).c_str());
  std::printf(
      "  documents       %s\n",
      number_or_unknown(s.has_document_starts() ? static_cast<int64_t>(s.document_starts().size()) : -1).c_str());
  std::printf("  bytes of text   %s\n", number_or_unknown(s.text_bytes()).c_str());
  std::printf("  tokenizer       %s\n", s.tokenizer().empty() ? "not recorded" : s.tokenizer().c_str());
  std::printf("  checksum        %s\n", s.checksum().empty() ? "not recorded" : (s.checksum() + ", verified").c_str());
  if (tokenizer) check_same_tokenizer(file, s.tokenizer(), "the tokenizer named", tokenizer->fingerprint());
  if (s.vocab_size() >= 0 && scan.max_id >= s.vocab_size()) {
    throw DataError(text(file, ": token ", scan.max_position, " is id ", scan.max_id, ", outside its vocabulary of ",
                         s.vocab_size(), ". The file is damaged."));
  }
  print_first(s, tokenizer, show);
}

int run_inspect(const InspectCommand& o) {
  std::unique_ptr<Tokenizer> tokenizer;
  if (!o.tokenizer.empty()) tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(o.tokenizer));
  for (const auto& file : expand_globs(o.files)) inspect(file, tokenizer.get(), o.show);
  return static_cast<int>(ExitCode::done);
}

void add_inspect(CLI::App& parent, int& exit_code) {
  auto o = std::make_shared<InspectCommand>();
  CLI::App& c = add_command(parent, "inspect", "What a token shard holds; its checksum and every id are checked",
                            "kestrel data inspect --tokenizer tokenizer.json data/kjv/train-00000.safetensors");
  c.add_option("files", o->files, "Shards: Kestrel's .safetensors, llm.c's .bin, Megatron's .bin or .idx")->required();
  c.add_option("--tokenizer", o->tokenizer, "Decode the first tokens with this tokenizer.json");
  add_integer(c, "--show", o->show, "How many of the first tokens to print, at most", 0, kMaxSize);
  c.callback([o, &exit_code] { exit_code = run_inspect(*o); });
}

}  // namespace

void add_data_command(CLI::App& app, int& exit_code) {
  CLI::App& command =
      add_command(app, "data", "Make token shards from text; look into shards",
                  "kestrel data build --tokenizer tokenizer.json --out data/kjv --validation-fraction 0.05 "
                  "--split-documents blank-line kjv.txt\n"
                  "kestrel data inspect data/kjv/train-00000.safetensors");
  command.require_subcommand(1);
  add_build(command, exit_code);
  add_inspect(command, exit_code);
}

}  // namespace kestrel::tools
