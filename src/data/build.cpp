#include "src/data/build.h"

#include <filesystem>
#include <optional>

#include "kernels/core/error.h"
#include "kernels/core/parallel.h"
#include "src/checkpoint/files.h"
#include "src/data/hash.h"
#include "src/data/shard_series.h"
#include "src/data/text_pieces.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;

void check(const BuildOptions& o) {
  if (!(o.validation_fraction >= 0 && o.validation_fraction < 1)) {
    throw ConfigError(text("validation fraction ", o.validation_fraction, " is outside [0, 1)"));
  }
  if (o.shard_tokens < 1024) throw ConfigError(text("shard size ", o.shard_tokens, " tokens is below 1024"));
  if (o.out.empty()) throw ConfigError("no output folder given");
  if (fs::path(o.validation_text).extension() == ".safetensors") {
    throw ConfigError(text("the held-out text would be written to ", o.validation_text,
                           ", which is named like a token shard. Give the text another extension, such as .txt."));
  }
}

bool held_out(int64_t document, const BuildOptions& o) {
  const uint64_t h = mix64(mix64(o.seed + 1) ^ static_cast<uint64_t>(document));
  return static_cast<double>(h >> 11) * 0x1p-53 < o.validation_fraction;
}

// Shards of an earlier build: a pattern such as DIR/train-*.safetensors would pick them up.
std::vector<fs::path> existing_shards(const std::string& out) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(out)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("train-") || name.starts_with("validation-");
    if (ours && name.ends_with(".safetensors")) found.push_back(entry.path());
  }
  return found;
}

void prepare_folder(const BuildOptions& o) {
  std::error_code error;
  fs::create_directories(o.out, error);
  if (error)
    throw DataError(text("cannot make the folder ", o.out, ": ", error.message(), ". Choose another with --out."));
  const auto old = existing_shards(o.out);
  if (!old.empty() && !o.force) {
    throw DataError(text(o.out, " already has ", old.size(), " shards (", old.front().filename().string(),
                         "). Choose another folder, or replace them with --force."));
  }
  if (!o.validation_text.empty() && fs::is_regular_file(o.validation_text) && !o.force) {
    throw DataError(text(o.validation_text, " exists. Choose another name, or replace it with --force."));
  }
}

// Encodes documents on all threads, a piece of one at a time.
class ParallelEncoder {
 public:
  explicit ParallelEncoder(const Tokenizer& tokenizer)
      : encoders_(static_cast<size_t>(omp_get_max_threads()), Encoder(tokenizer)) {}

  struct Result {
    std::vector<TextPiece> pieces;
    std::vector<std::vector<int32_t>> tokens;  // [pieces]
  };
  Result encode(const std::vector<std::string>& documents) {
    Result r{cut_documents(documents), {}};
    r.tokens.resize(r.pieces.size());
    parallel_for_dynamic(static_cast<int64_t>(r.pieces.size()), [&](int64_t i) {
      const auto p = static_cast<size_t>(i);
      encoders_[static_cast<size_t>(omp_get_thread_num())].encode(r.pieces[p].text, r.tokens[p]);
    });
    return r;
  }

 private:
  std::vector<Encoder> encoders_;
};

class Builder {
 public:
  Builder(const Tokenizer& tokenizer, const BuildOptions& o)
      : options_(o),
        encoder_(tokenizer),
        eos_{eos_of(tokenizer, o)},
        train_(o.out + "/train", o.shard_tokens, common(tokenizer)),
        validation_(o.out + "/validation", o.shard_tokens, common(tokenizer)) {
    if (!o.validation_text.empty()) validation_text_.emplace(o.validation_text);
  }

  void add(const std::vector<std::string>& documents) {
    const auto encoded = encoder_.encode(documents);
    for (size_t p = 0; p < encoded.pieces.size();) {
      const size_t d = encoded.pieces[p].document;
      size_t end = p;
      int64_t tokens = 1;  // the end-of-text token
      for (; end < encoded.pieces.size() && encoded.pieces[end].document == d; ++end) {
        tokens += static_cast<int64_t>(encoded.tokens[end].size());
      }
      ShardSeries& series = series_for(documents[d]);
      series.begin_document(tokens, static_cast<int64_t>(documents[d].size()));
      for (; p < end; ++p) series.append(encoded.tokens[p]);
      series.append(eos_);
    }
  }

  BuildReport finish() {
    check_split();
    train_.finish();
    validation_.finish();
    if (options_.force) {
      for (const auto& old : existing_shards(options_.out)) remove(old);
    }
    if (validation_text_) validation_text_->commit();
    BuildReport report{report_of(train_), report_of(validation_)};
    report.train.files = train_.publish();
    report.validation.files = validation_.publish();
    sync_directory(options_.out);
    return report;
  }

  int64_t documents() const { return train_.documents() + validation_.documents(); }
  int64_t tokens() const { return train_.tokens() + validation_.tokens(); }

 private:
  static int32_t eos_of(const Tokenizer& t, const BuildOptions& o) {
    const auto id = t.id_of(o.eos);
    if (id) return *id;
    std::string known;
    for (const auto& s : t.parts().specials) known += (known.empty() ? "" : ", ") + s.content;
    throw DataError(text("the tokenizer has no special token \"", o.eos, "\" to end documents with (it has: ",
                         known.empty() ? "none" : known, "). Name one of them with --eos."));
  }
  ShardContents common(const Tokenizer& t) const {
    ShardContents c;
    c.vocab_size = t.vocab_size();
    c.eos_id = eos_.front();
    c.tokenizer = t.fingerprint();
    c.token_bytes = t.token_bytes();
    return c;
  }
  ShardSeries& series_for(const std::string& document) {
    if (!held_out(documents(), options_)) return train_;
    if (validation_text_) validation_text_->write(document.data(), static_cast<int64_t>(document.size()));
    return validation_;
  }
  void check_split() const {
    if (documents() == 0) {
      throw DataError(
          "the input has no text: every document is empty. Check that the inputs are the files you mean and, for JSON "
          "lines, that --key names the text.");
    }
    const bool none_held_out = options_.validation_fraction > 0 && validation_.documents() == 0;
    if (none_held_out || train_.documents() == 0) {
      throw DataError(text("of ", documents(), " documents ", validation_.documents(), " were held out (fraction ",
                           options_.validation_fraction,
                           "): one side is empty. Cut the text into more documents "
                           "(--split-documents), or change the fraction or --seed."));
    }
  }
  static void remove(const fs::path& old) {
    std::error_code error;
    fs::remove(old, error);
    if (error) throw DataError(text("cannot remove ", old.string(), ": ", error.message()));
  }
  static SplitReport report_of(const ShardSeries& s) { return {s.documents(), s.tokens(), s.bytes(), {}}; }

  BuildOptions options_;
  ParallelEncoder encoder_;
  std::vector<int32_t> eos_;  // one token
  ShardSeries train_, validation_;
  std::optional<AtomicFile> validation_text_;
};

}  // namespace

BuildReport build_dataset(const Tokenizer& tokenizer, const std::vector<std::string>& inputs,
                          const BuildOptions& options, const std::function<void(const BuildProgress&)>& progress) {
  constexpr int64_t kBatchBytes = int64_t{16} << 20;
  check(options);
  DocumentReader reader(inputs, options.input);
  prepare_folder(options);
  Builder builder(tokenizer, options);
  std::vector<std::string> documents;
  while (reader.next_batch(documents, kBatchBytes)) {
    builder.add(documents);
    if (progress) progress({reader.bytes_done(), reader.total_bytes(), builder.documents(), builder.tokens()});
  }
  BuildReport report = builder.finish();
  report.empty_documents = reader.empty_documents();
  return report;
}

}  // namespace kestrel
