// What commands are given: outputs that are inputs, numbers, tokenizers that do not belong together, damaged text.
#include "program.h"
#include "src/data/tokenizer.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

constexpr int kUsage = 2, kData = 3;

Arguments joined(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Text, its shards and its tokenizer, and a second tokenizer, other.json.
class Inputs : public ::testing::Test {
 protected:
  Inputs() {
    make_text_data(dir_.path());
    must(program({"tokenizer", "train", "--vocab-size", "290", "--out", dir_ / "other.json", dir_ / "text.txt"}));
  }

  json run(const std::string& name) const {
    json run = tiny_run(dir_ / "data/train-*.safetensors", dir_ / name);
    run["model"]["vocab_size"] = 300;
    run["data"]["validation"] = {dir_ / "data/validation-*.safetensors"};
    run["data"]["tokenizer"] = dir_ / "tokenizer.json";
    return run;
  }
  Outcome train(const json& run) const {
    write_text(dir_ / "run.json", run.dump());
    return program({"train", dir_ / "run.json"});
  }
  // Refused, and every file is as it was.
  void nothing_changes(const Arguments& command, const std::vector<std::string>& pieces) const {
    const auto before = files_of(dir_.path());
    expect_refusal(program(command), kUsage, pieces);
    EXPECT_EQ(files_of(dir_.path()), before);
  }

  TempDir dir_;
};

}  // namespace

// --------------------------------------------------------------------------------------------------- outputs and
// inputs

TEST_F(Inputs, NoOutputReplacesAnInput) {
  const std::string text = dir_ / "text.txt", tokenizer = dir_ / "tokenizer.json", link = dir_ / "link";
  const std::string spelled = dir_ / "data/../text.txt", why = "would be overwritten";
  std::filesystem::create_symlink("text.txt", link);
  for (const std::string& out : {text, spelled, link}) {
    nothing_changes({"tokenizer", "train", "--vocab-size", "300", "--force", "--out", out, dir_ / "*.txt"}, {out, why});
    nothing_changes({"tokenizer", "encode", text, "--tokenizer", tokenizer, "--out", out}, {out, why});
    nothing_changes({"data", "build", "--tokenizer", tokenizer, "--out", dir_ / "data", "--force", "--split-documents",
                     "line", "--validation-fraction", "0.1", "--write-validation-text", out, text},
                    {out, why});
  }
  nothing_changes({"tokenizer", "decode", text, "--tokenizer", tokenizer, "--out", tokenizer}, {tokenizer, why});
  nothing_changes({"data", "build", "--tokenizer", tokenizer, "--out", dir_ / "data", "--force", "--split-documents",
                   "line", "--validation-fraction", "0.1", "--write-validation-text", tokenizer, text},
                  {tokenizer, why});
}

TEST(ParityOutput, ReplacesNoInput) {
  const TempDir dir;
  std::filesystem::copy(std::string(KESTREL_FIXTURES) + "/model_k3", dir / "model");
  const auto before = files_of(dir.path());
  for (const char* name : {"expected.safetensors", "model.safetensors", "config.json"}) {
    const std::string out = dir / "model/" + name;
    expect_refusal(
        program({"parity", "--model", dir / "model", "--tokens", dir / "model/expected.safetensors", "--out", out}),
        kUsage, {out, "would be overwritten"});
  }
  EXPECT_EQ(files_of(dir.path()), before);
}

// ------------------------------------------------------------------------------------------------------------
// tokenizers

TEST_F(Inputs, AModelKeepsItsTokenizer) {
  must(train(run("run")));
  const std::string own = Tokenizer::load(dir_ / "tokenizer.json").fingerprint(),
                    other = Tokenizer::load(dir_ / "other.json").fingerprint();
  must(program({"export-hf", dir_ / "run", "--out", dir_ / "exported"}));
  for (const std::string model : {"run", "exported"}) {
    const Arguments with_other = {dir_ / model, "--tokenizer", dir_ / "other.json"};
    expect_refusal(program(joined({"generate"}, with_other)), kData, {own, other, "other.json"});
    expect_refusal(program(joined({"eval"}, with_other)), kData, {own, other, "other.json"});
    expect_refusal(program(joined({"export-hf", "--out", dir_ / "never"}, with_other)), kData, {own, other});
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ / "never"));
  expect_refusal(program({"generate", dir_ / "run", "--tokenizer", dir_ / "absent"}), kData,
                 {"absent", "kestrel tokenizer train"});
  // The file that the run names has become another: the checkpoint knows.
  std::filesystem::copy_file(dir_ / "other.json", dir_ / "tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing);
  expect_refusal(program({"generate", dir_ / "run"}), kData, {own, other, "tokenizer.json"});
}

TEST_F(Inputs, ValidationShardsAreOfTheTrainingShardsTokenizer) {
  must(program({"data", "build", "--tokenizer", dir_ / "other.json", "--out", dir_ / "other", "--split-documents",
                "line", dir_ / "text.txt"}));
  const std::string own = Tokenizer::load(dir_ / "tokenizer.json").fingerprint(),
                    other = Tokenizer::load(dir_ / "other.json").fingerprint();
  json j = run("run");
  j["data"]["tokenizer"] = nullptr;
  j["data"]["validation"] = {dir_ / "other/train-00000.safetensors"};
  expect_refusal(train(j), kData, {"other/train-00000.safetensors", own, other});
  j["data"]["validation"] = {dir_ / "data/validation-00000.safetensors"};
  must(train(j));
  // Without a tokenizer file, too, the checkpoint knows which one it was.
  expect_refusal(program({"eval", dir_ / "run", "--data", dir_ / "other/train-00000.safetensors"}), kData,
                 {own, other});
  expect_refusal(program({"generate", dir_ / "run", "--tokenizer", dir_ / "other.json"}), kData, {own, other});
}

// ----------------------------------------------------------------------------------------------------------- damaged
// data

TEST_F(Inputs, AFlippedDocumentStartIsFound) {
  const std::string shard = dir_ / "data/train-00000.safetensors";
  std::string bytes = read_text(shard);
  const SafetensorsFile file(shard);
  const auto& starts = file.entry("document_starts");
  const auto& first = *std::min_element(file.entries().begin(), file.entries().end(),
                                        [](const auto& a, const auto& b) { return a.second.data < b.second.data; });
  int64_t data = static_cast<int64_t>(bytes.size());
  for (const auto& [name, entry] : file.entries()) data -= entry.bytes;
  const int64_t at =
      data + (static_cast<const char*>(starts.data) - static_cast<const char*>(first.second.data)) + 8 * 5;
  bytes[static_cast<size_t>(at)] ^= 1;
  std::filesystem::remove(shard);
  write_text(shard, bytes);
  expect_refusal(train(run("run")), kData, {shard, "checksum", "kestrel data build"});
  expect_refusal(program({"data", "inspect", shard}), kData, {shard, "checksum"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run"));
}

TEST_F(Inputs, DocumentsWithoutTextAreReported) {
  write_text(dir_ / "some.jsonl", "{\"text\": \"a\"}\n{\"text\": \"\"}\n\n{\"text\": \" \"}\n");
  const Arguments build = {"data", "build", "--tokenizer", dir_ / "tokenizer.json", "--out", dir_ / "some"};
  const Outcome o = must(program(joined(build, {dir_ / "some.jsonl"})));
  EXPECT_NE(o.out.find("left out   2 documents without text\n"), std::string::npos) << o.out;
  write_text(dir_ / "none.txt", "\n");
  expect_refusal(program(joined(build, {"--force", dir_ / "none.txt"})), kData, {"no text", "--key"});
}

// ----------------------------------------------------------------------------------------------------------------
// numbers

TEST(Numbers, AreWholeAndInRange) {
  const auto refused = [](const Arguments& command, const std::string& option, const std::string& value,
                          const std::string& range) {
    expect_refusal(program(joined(command, {option, value})), kUsage,
                   {option + " is \"" + value + "\"", "whole number from " + range + "."});
  };
  const std::string size = "1 to 2147483647", all = "0 to 18446744073709551615";
  for (const char* value : {"0", "-1", "1.5", "1e3", "0x10", " 7", "", "9223372036854775807", "99999999999999999999"}) {
    refused({"generate", "run"}, "--max-tokens", value, size);
  }
  refused({"generate", "run"}, "--seed", "-1", all);
  refused({"generate", "run"}, "--seed", "18446744073709551616", all);
  refused({"generate", "run"}, "--top-k", "99999999999999999999", "0 to 2147483647");
  refused({"eval", "run"}, "--batch", "-1", size);
  refused({"eval", "run"}, "--sequence-length", "0", size);
  refused({"data", "build", "x"}, "--seed", "-1", all);
  refused({"data", "build", "x"}, "--shard-tokens", "1023", "1024 to 9223372036854775807");
  refused({"data", "inspect", "x"}, "--show", "-1", "0 to 2147483647");
  refused({"tokenizer", "train", "x"}, "--vocab-size", "16777217", "257 to 16777216");
  refused({"tokenizer", "train", "x"}, "--min-count", "0", "1 to 9223372036854775807");
  refused({"bench", "op"}, "--samples", "0", size);
  refused({"bench", "step", "x"}, "--repeats", "0", size);
  refused({"bench", "step", "x"}, "--warmup", "-1", "0 to 2147483647");
}

TEST_F(Inputs, AnswersAreIndicesAndQuestionsFitARow) {
  must(train(run("run")));
  const auto eval = [&](const std::string& context, const std::string& answer, const Arguments& more = {}) {
    write_text(dir_ / "q.jsonl",
               "\n{\"context\": \"" + context + "\", \"choices\": [\"b\", \"c\"], \"answer\": " + answer + "}\n");
    return program(joined({"eval", dir_ / "run", "--choices", dir_ / "q.jsonl"}, more));
  };
  for (const char* answer : {"0.9", "-1", "2", "true", "\"1\"", "1e0", "18446744073709551616"}) {
    expect_refusal(eval("a", answer), kData, {"q.jsonl line 2", std::string("answer ") + json::parse(answer).dump()});
  }
  must(eval("a", "1"));
  std::string words;
  for (int i = 0; i < 30; ++i) words += "zq ";
  expect_refusal(eval(words, "1"), kData, {"q.jsonl line 2", "the limit is 24", "--sequence-length"});
  must(eval(words, "1", {"--sequence-length", "200"}));
}

TEST_F(Inputs, SpecialTokensAreUtf8) {
  expect_refusal(program({"tokenizer", "train", "--vocab-size", "300", "--special", "\xff", "--out", dir_ / "new.json",
                          dir_ / "text.txt"}),
                 kUsage, {"special token 2", "UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "new.json"));
}

// A run's folder is not a model in Hugging Face's layout.
TEST_F(Inputs, ARunIsExportedFirst) {
  must(train(run("run")));
  for (const Arguments& command : {Arguments{"parity", "--model", dir_ / "run", "--tokens", "x", "--out", dir_ / "out"},
                                   Arguments{"import-hf", dir_ / "run", "--out", dir_ / "out"}}) {
    expect_refusal(program(command), kData, {dir_ / "run", "kestrel export-hf"});
  }
}
