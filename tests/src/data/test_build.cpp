#include "src/data/build.h"

#include <omp.h>
#include <zlib.h>

#include <cmath>

#include "kernels/core/error.h"
#include "src/data/bpe_train.h"
#include "src/data/dataset.h"
#include "tests/src/data/scratch_folder.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::message_of;
using test::ScratchFolder;
using Strings = std::vector<std::string>;

std::string excerpt() {
  return ScratchFolder::read(std::string(KESTREL_FIXTURES) + "/text/kjv_excerpt.txt");
}

std::string gzipped(const std::string& path, const std::string& content) {
  gzFile f = gzopen(path.c_str(), "wb");
  EXPECT_EQ(gzwrite(f, content.data(), static_cast<unsigned>(content.size())), static_cast<int>(content.size()));
  EXPECT_EQ(gzclose(f), Z_OK);
  return path;
}

Strings documents_of(const Strings& files, InputOptions options = {}, int64_t* empty = nullptr) {
  DocumentReader reader(files, options);
  Strings found;
  std::string d;
  while (reader.next(d)) found.push_back(d);
  EXPECT_EQ(reader.bytes_done(), reader.total_bytes());
  if (empty) *empty = reader.empty_documents();
  return found;
}

TEST(Documents, PlainTextIsCutAsAsked) {
  const ScratchFolder dir;
  const auto f = dir.write("a.txt", "one\r\ntwo\n \t\n\n\nthree\xff\nfour");
  EXPECT_EQ(documents_of({f}), (Strings{"one\r\ntwo\n \t\n\n\nthree\xff\nfour"}));
  EXPECT_EQ(documents_of({f}, {.split = DocumentSplit::blank_line}), (Strings{"one\r\ntwo\n", "three\xff\nfour"}));
  EXPECT_EQ(documents_of({f}, {.split = DocumentSplit::line}), (Strings{"one\r\n", "two\n", "three\xff\n", "four"}));
}

TEST(Documents, EmptyFilesHaveNone) {
  const ScratchFolder dir;
  const auto empty = dir.write("a.txt", ""), blank = dir.write("b.txt", "\n\n  \n"), text = dir.write("c.txt", "x");
  for (auto split : {DocumentSplit::file, DocumentSplit::blank_line, DocumentSplit::line}) {
    EXPECT_EQ(documents_of({empty, blank, text}, {.split = split}), (Strings{"x"}));
  }
}

TEST(Documents, EmptyOnesAreCounted) {
  const ScratchFolder dir;
  const auto empty_of = [](const Strings& files, DocumentSplit split) {
    int64_t n = -1;
    documents_of(files, {.split = split}, &n);
    return n;
  };
  const auto none = dir.write("a.txt", ""), blank = dir.write("b.txt", "\n\n  \n"), text = dir.write("c.txt", "x\n\ny");
  EXPECT_EQ(empty_of({none, blank, text}, DocumentSplit::file), 2);
  EXPECT_EQ(empty_of({none, blank, text}, DocumentSplit::line), 4);
  EXPECT_EQ(empty_of({none, blank, text}, DocumentSplit::blank_line), 0);  // white space belongs to no document
  const auto json = dir.write("d.jsonl", "{\"text\": \"\"}\n\n{\"text\": \" \\n\"}\n{\"text\": \"x\"}\n");
  EXPECT_EQ(empty_of({json}, DocumentSplit::file), 2);  // the blank line is none
}

TEST(Documents, LinesLongerThanTheBufferAreWhole) {
  const ScratchFolder dir;
  const std::string line = std::string(700000, 'a') + "\n";
  const auto found = documents_of({dir.write("a.txt", line + line + "end")}, {.split = DocumentSplit::line});
  EXPECT_EQ(found, (Strings{line, line, "end"}));
}

TEST(Documents, JsonLinesAndGzip) {
  const ScratchFolder dir;
  const std::string lines = "{\"text\": \"caf\\u00e9\\n\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"two\"}";
  const Strings expected = {"caf\u00e9\n", "two"};
  EXPECT_EQ(documents_of({dir.write("a.jsonl", lines)}), expected);
  EXPECT_EQ(documents_of({gzipped(dir / "b.jsonl.gz", lines)}), expected);
  EXPECT_EQ(documents_of({gzipped(dir / "c.txt.gz", "plain")}), Strings{"plain"});
  EXPECT_EQ(documents_of({dir.write("d.jsonl", "{\"body\": \"x\"}")}, {.json_key = "body"}), Strings{"x"});
  EXPECT_EQ(documents_of({dir / "*.gz"}), (Strings{expected[0], expected[1], "plain"}));
}

TEST(Documents, BadInputIsNamed) {
  const ScratchFolder dir;
  const auto error = [](const std::string& file) { return message_of<DataError>([&] { documents_of({file}); }); };
  EXPECT_CONTAINS(error(dir.write("a.jsonl", "{\"text\": \"x\"}\n{\"text\": ")), "a.jsonl line 2");
  EXPECT_CONTAINS(error(dir.write("b.jsonl", "{\"body\": \"x\"}")), "no key \"text\"");
  EXPECT_CONTAINS(error(dir.write("c.jsonl", "{\"text\": 5}")), "not a string");
  EXPECT_CONTAINS(error(dir.write("d.jsonl", "[1]")), "not a JSON object");
  EXPECT_CONTAINS(error(dir.write("e.jsonl", "{\"text\": \"\xff\"}")), "e.jsonl line 1");
  EXPECT_CONTAINS(error(dir.write("f.parquet", "PAR1")), ".parquet");
  EXPECT_CONTAINS(error(dir / "none.txt"), "none.txt");
  EXPECT_CONTAINS(error(dir / ""), "directory");
  const std::string whole = ScratchFolder::read(gzipped(dir / "g.txt.gz", excerpt()));
  EXPECT_CONTAINS(error(dir.write("h.txt.gz", whole.substr(0, whole.size() / 2))), "truncated");
  EXPECT_CONTAINS(message_of<DataError>([] { documents_of({}); }), "no input");
  const std::string twice = error(dir.write("i.jsonl", "{\"text\": \"x\"}\n{\"text\": \"y\", \"text\": \"z\"}"));
  EXPECT_CONTAINS(twice, "i.jsonl line 2");
  EXPECT_CONTAINS(twice, "\"text\" twice");
  EXPECT_FALSE(document_split_from("page").has_value());
}

TEST(Documents, AGzipFileIsOneToItsEnd) {
  const ScratchFolder dir;
  const auto error = [](const std::string& file) { return message_of<DataError>([&] { documents_of({file}); }); };
  const std::string whole = ScratchFolder::read(gzipped(dir / "whole.txt.gz", excerpt()));
  EXPECT_EQ(documents_of({dir.write("two.txt.gz", whole + whole)}), Strings{excerpt() + excerpt()});
  EXPECT_EQ(documents_of({dir.write("by_content.txt", whole)}), Strings{excerpt()});
  EXPECT_CONTAINS(error(dir.write("plain.txt.gz", "plain text")), "plain.txt.gz is named like a gzip file");
  EXPECT_CONTAINS(error(dir.write("empty.txt.gz", "")), "empty.txt.gz is named like a gzip file");
  EXPECT_CONTAINS(error(dir.write("more.txt.gz", whole + "more")), "not gzip follows");
  EXPECT_CONTAINS(error(dir.write("one.txt.gz", whole + "\x1f")), "truncated");
  std::string flipped = whole;
  flipped[flipped.size() - 6] ^= 1;  // of the stream's own checksum
  EXPECT_CONTAINS(error(dir.write("flipped.txt.gz", flipped)), "incorrect data check");
}

const Tokenizer& tokenizer() {
  static const Tokenizer t = [] {
    BpeTrainer trainer({.vocab_size = 600});
    trainer.add(Strings{excerpt()});
    return trainer.train();
  }();
  return t;
}

std::vector<int32_t> tokens_of(const std::string& file) {
  const Shard s(file);
  std::vector<int32_t> v(static_cast<size_t>(s.size()));
  s.read(0, s.size(), v.data());
  return v;
}

BuildOptions chapters(const std::string& out) {
  BuildOptions o;
  o.out = out;
  o.input.split = DocumentSplit::blank_line;
  return o;
}

TEST(Build, ShardsHoldEveryDocumentAndItsEnd) {
  const ScratchFolder dir;
  const auto input = dir.write("kjv.txt", excerpt());
  const int32_t eos = *tokenizer().id_of(kEndOfText);
  const Strings documents = documents_of({input}, {.split = DocumentSplit::blank_line});
  ASSERT_EQ(documents.size(), 70u);
  BuildOptions o = chapters(dir / "out");
  o.shard_tokens = 20000;
  const BuildReport report = build_dataset(tokenizer(), {input}, o);
  EXPECT_GT(report.train.files.size(), 3u);
  EXPECT_EQ(report.train.documents, 70);
  EXPECT_EQ(report.validation.documents, 0);
  size_t d = 0;
  int64_t bytes = 0;
  for (const auto& file : report.train.files) {
    const Shard s(file);
    EXPECT_LE(s.size(), 25000);  // a small last shard is joined to the one before it
    EXPECT_GE(s.size(), 5000);
    EXPECT_EQ(s.vocab_size(), tokenizer().vocab_size());
    EXPECT_EQ(s.eos_id(), eos);
    EXPECT_EQ(s.tokenizer(), tokenizer().fingerprint());
    EXPECT_EQ(s.token_bytes(), tokenizer().token_bytes());
    bytes += s.text_bytes();
    const auto tokens = tokens_of(file);
    for (size_t i = 0; i < s.document_starts().size(); ++i, ++d) {
      const auto begin = s.document_starts()[i];
      const auto end = i + 1 < s.document_starts().size() ? s.document_starts()[i + 1] : s.size();
      const std::vector<int32_t> piece(tokens.begin() + begin, tokens.begin() + end);
      ASSERT_EQ(piece.back(), eos);
      ASSERT_EQ(tokenizer().decode(std::span(piece).first(piece.size() - 1)), documents[d]);
    }
  }
  EXPECT_EQ(d, documents.size());
  EXPECT_EQ(bytes, report.train.bytes);
  const TokenDataset data({dir / "out/train-*.safetensors"}, 64, 600, tokenizer().fingerprint());
  EXPECT_EQ(data.tokens(), report.train.tokens);
  EXPECT_EQ(data.bytes(), bytes);
  EXPECT_TRUE(data.knows_documents());
}

TEST(Build, HeldOutDocumentsAndTheirText) {
  const ScratchFolder dir;
  const auto input = dir.write("kjv.txt", excerpt());
  BuildOptions o = chapters(dir / "a");
  o.validation_fraction = 0.2;
  o.validation_text = dir / "held_out.txt";
  const BuildReport a = build_dataset(tokenizer(), {input}, o);
  EXPECT_EQ(a.train.documents + a.validation.documents, 70);
  EXPECT_GT(a.validation.documents, 5);  // 14 expected, standard deviation 3.3
  EXPECT_LT(a.validation.documents, 25);
  const std::string text = ScratchFolder::read(dir / "held_out.txt");
  EXPECT_EQ(static_cast<int64_t>(text.size()), a.validation.bytes);
  std::string decoded;
  for (int32_t id : tokens_of(dir / "a/validation-00000.safetensors")) {
    if (!tokenizer().is_special(id)) decoded += tokenizer().bytes_of(id);
  }
  EXPECT_EQ(decoded, text);
  // The exact bytes behind any targets: here, behind all of the shard.
  const TokenDataset data(a.validation.files, 16, 600);
  int64_t sum = 0;
  for (int32_t id : tokens_of(a.validation.files[0])) sum += data.token_bytes()[static_cast<size_t>(id)];
  EXPECT_EQ(sum, a.validation.bytes);
  // Another seed holds out others.
  o.out = dir / "b";
  o.seed = 1;
  o.validation_text.clear();
  build_dataset(tokenizer(), {input}, o);
  EXPECT_NE(tokens_of(dir / "b/validation-00000.safetensors"), tokens_of(dir / "a/validation-00000.safetensors"));
}

TEST(Build, ThreadsChangeNoByte) {
  const ScratchFolder dir;
  std::string big;
  for (int i = 0; i < 4; ++i) big += excerpt();  // one document of several pieces
  const Strings inputs = {dir.write("a.txt", big), dir.write("b.txt", excerpt())};
  const int threads = omp_get_max_threads();
  for (int n : {1, 3}) {
    omp_set_num_threads(n);
    BuildOptions o;
    o.out = dir / std::to_string(n);
    build_dataset(tokenizer(), inputs, o);
  }
  omp_set_num_threads(threads);
  EXPECT_EQ(ScratchFolder::read(dir / "1/train-00000.safetensors"),
            ScratchFolder::read(dir / "3/train-00000.safetensors"));
  auto expected = tokenizer().encode(big);
  expected.push_back(*tokenizer().id_of(kEndOfText));
  auto found = tokens_of(dir / "1/train-00000.safetensors");
  found.resize(expected.size());
  EXPECT_EQ(found, expected);
}

TEST(Build, OldShardsAreReplacedOnlyWithForce) {
  const ScratchFolder dir;
  const auto input = dir.write("kjv.txt", excerpt());
  BuildOptions o = chapters(dir / "out");
  o.shard_tokens = 20000;
  build_dataset(tokenizer(), {input}, o);
  EXPECT_CONTAINS(message_of<DataError>([&] { build_dataset(tokenizer(), {input}, o); }), "--force");
  o.shard_tokens = 1000000;
  o.force = true;
  const auto report = build_dataset(tokenizer(), {input}, o);
  EXPECT_EQ(report.train.files.size(), 1u);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir / "out")) files += entry.exists();
  EXPECT_EQ(files, 1);  // no shard of the old build, no temporary file
  o.force = false;
  o.out = dir / "other";
  o.validation_fraction = 0.2;
  o.validation_text = input;
  EXPECT_CONTAINS(message_of<DataError>([&] { build_dataset(tokenizer(), {input}, o); }), "kjv.txt exists");
}

TEST(Build, AFailureLeavesNothing) {
  const ScratchFolder dir;
  const Strings inputs = {dir.write("a.txt", excerpt() + excerpt()), dir.write("b.jsonl", "oops")};
  BuildOptions o = chapters(dir / "out");
  o.shard_tokens = 10000;
  EXPECT_CONTAINS(message_of<DataError>([&] { build_dataset(tokenizer(), inputs, o); }), "b.jsonl line 1");
  EXPECT_TRUE(std::filesystem::is_empty(dir / "out"));
}

TEST(Build, BadOptionsAreNamed) {
  const ScratchFolder dir;
  const auto input = dir.write("a.txt", "some text");
  const auto build = [&](auto&& change) {
    BuildOptions o;
    o.out = dir / "out";
    change(o);
    build_dataset(tokenizer(), {input}, o);
  };
  const auto config = [&](auto&& change) { return message_of<ConfigError>([&] { build(change); }); };
  const auto data = [&](auto&& change) { return message_of<DataError>([&] { build(change); }); };
  EXPECT_CONTAINS(config([](BuildOptions& o) { o.validation_fraction = 1; }), "fraction 1");
  EXPECT_CONTAINS(config([](BuildOptions& o) { o.validation_fraction = std::nan(""); }), "nan");
  EXPECT_CONTAINS(config([](BuildOptions& o) { o.shard_tokens = 3; }), "below 1024");
  EXPECT_CONTAINS(config([&](BuildOptions& o) { o.validation_text = o.out + "/train-00000.safetensors"; }), ".txt");
  EXPECT_CONTAINS(data([](BuildOptions& o) { o.eos = "</s>"; }), "<|endoftext|>");
  EXPECT_CONTAINS(data([](BuildOptions& o) { o.validation_fraction = 0.5; }), "one side is empty");
  EXPECT_CONTAINS(data([&](BuildOptions& o) { o.out = input; }), "cannot make the folder");
}

}  // namespace
}  // namespace kestrel
