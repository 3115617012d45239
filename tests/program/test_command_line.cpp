// What a user can get wrong around training: outputs that are inputs, another tokenizer, numbers, files.
#include "program.h"
#include "src/checkpoint/safetensors.h"
#include "src/data/shard.h"
#include "src/data/tokenizer.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

constexpr int kUsage = 2, kData = 3;
const std::string kGolden = std::string(KESTREL_FIXTURES) + "/model_k3";

// Text, its shards and its tokenizer of 300 ids, and a run that trained on them without naming the tokenizer.
class CommandLine : public ::testing::Test {
 protected:
  CommandLine() { make_text_data(dir_.path()); }

  json run_file() const {
    json j = tiny_run(dir_ / "data/train-*.safetensors", run_);
    j["model"]["vocab_size"] = 300;
    return j;
  }
  Outcome train(const Arguments& overrides = {}) const {
    write_text(dir_ / "run.json", run_file().dump());
    Arguments a = {"train", dir_ / "run.json"};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return program(a);
  }
  // Refused, and every file is as it was.
  void refused(const Arguments& a, int code, const std::vector<std::string>& pieces) const {
    const auto before = files_of(dir_.path());
    expect_refusal(program(a), code, pieces);
    EXPECT_TRUE(files_of(dir_.path()) == before) << "a file was changed by " << a[0] << " " << a[1];
  }
  std::string other_tokenizer() const {
    must(program({"tokenizer", "train", "--vocab-size", "290", "--out", dir_ / "other.json", text_}));
    return dir_ / "other.json";
  }

  TempDir dir_;
  const std::string text_ = dir_ / "text.txt", tokenizer_ = dir_ / "tokenizer.json", run_ = dir_ / "run";
  const std::string shard_ = dir_ / "data/train-00000.safetensors";
};

}  // namespace

TEST_F(CommandLine, AnOutputIsNeverAnInput) {
  const std::string linked = dir_ / "linked", spelled = dir_ / "data/../text.txt";
  std::filesystem::create_symlink(text_, linked);
  for (const std::string& out : {text_, linked, spelled, tokenizer_}) {
    refused({"tokenizer", "encode", text_, "--tokenizer", tokenizer_, "--out", out}, kUsage, {out, "another name"});
    refused({"tokenizer", "decode", text_, "--tokenizer", tokenizer_, "--out", out}, kUsage, {out, "another name"});
    refused({"data", "build", text_, "--tokenizer", tokenizer_, "--out", dir_ / "data", "--validation-fraction", "0.1",
             "--force", "--write-validation-text", out},
            kUsage, {out, "another name"});
  }
  refused({"tokenizer", "train", dir_ / "*.txt", "--out", spelled, "--force"}, kUsage, {spelled, text_});

  std::filesystem::copy(kGolden, dir_ / "golden");
  const std::string model = dir_ / "golden", tokens = model + "/expected.safetensors";
  for (const char* name : {"expected.safetensors", "model.safetensors", "config.json"}) {
    const std::string out = model + "/./" + name;
    refused({"parity", "--model", model, "--tokens", tokens, "--out", out}, kUsage, {out, "another name"});
  }
  refused({"import-hf", model, "--out", model}, kData, {model, "not an empty folder"});
  refused({"export-hf", model, "--out", model}, kData, {model, "not an empty folder"});
}

TEST_F(CommandLine, AnotherTokenizerIsRefusedWithBothFingerprints) {
  const std::string other = other_tokenizer();
  const std::string a = Tokenizer::load(tokenizer_).fingerprint(), b = Tokenizer::load(other).fingerprint();
  must(program({"data", "build", text_, "--tokenizer", other, "--out", dir_ / "others", "--validation-fraction", "0.1",
                "--split-documents", "line"}));
  expect_refusal(train({"data.validation=[\"" + dir_.path() + "/others/validation-*.safetensors\"]"}), kData,
                 {"others/validation-00000.safetensors", a, b, "kestrel data build"});
  EXPECT_FALSE(std::filesystem::exists(run_));
  must(train());
  const std::string out = dir_ / "exported";
  refused({"generate", run_, "--tokenizer", other}, kData, {other, a, b});
  refused({"export-hf", run_, "--tokenizer", other, "--out", out}, kData, {other, a, b});
  refused({"eval", run_, "--tokenizer", other, "--data", shard_}, kData, {other, a, b});
  refused({"eval", run_, "--data", dir_ / "others/train-*"}, kData, {"others/train-00000.safetensors", a, b});
  refused({"data", "inspect", shard_, "--tokenizer", other}, kData, {shard_, a, b});

  // The same tokenizer in another file is the same tokenizer.
  std::filesystem::copy(tokenizer_, dir_ / "copy.json");
  must(program({"generate", run_, "--tokenizer", dir_ / "copy.json", "--max-tokens", "2"}));
  must(program({"export-hf", run_, "--tokenizer", dir_ / "copy.json", "--out", out}));
  refused({"generate", out, "--tokenizer", other}, kData, {other, a, b});
  // The file that a run names becomes another: its checkpoint knows.
  const std::string named = dir_ / "named";
  must(train({"data.tokenizer=" + (dir_ / "copy.json"), "log.dir=" + named}));
  std::filesystem::copy_file(other, dir_ / "copy.json", std::filesystem::copy_options::overwrite_existing);
  refused({"generate", named}, kData, {dir_ / "copy.json", a, b});
}

TEST_F(CommandLine, ADamagedShardIsFound) {
  // The tensors end the file without a hole; document_starts, the widest, come first.
  size_t tensors = 0;
  const SafetensorsFile file(shard_);
  for (const auto& [name, e] : file.entries()) tensors += static_cast<size_t>(e.bytes);
  std::string bytes = read_text(shard_);
  bytes[bytes.size() - tensors + 8] ^= 1;  // the second one's lowest bit
  write_text(dir_ / "data/damaged.safetensors", bytes);
  const Shard damaged(dir_ / "data/damaged.safetensors");  // nothing but the checksum tells
  EXPECT_NE(damaged.document_starts()[1], Shard(shard_).document_starts()[1]);
  refused({"data", "inspect", damaged.path()}, kData, {damaged.path(), "checksum", "kestrel data build"});
  expect_refusal(train({"data.train=[\"" + damaged.path() + "\"]"}), kData, {damaged.path(), "checksum"});
  EXPECT_FALSE(std::filesystem::exists(run_));
  EXPECT_NE(must(program({"data", "inspect", shard_})).out.find("verified"), std::string::npos);
}

TEST_F(CommandLine, DocumentsWithoutTextAreReported) {
  write_text(dir_ / "four.txt", "one\n\n \ntwo\n");
  const Outcome o = must(program({"data", "build", dir_ / "four.txt", "--tokenizer", tokenizer_, "--out", dir_ / "four",
                                  "--split-documents", "line"}));
  EXPECT_NE(o.out.find("2 documents, "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("2 documents without text"), std::string::npos) << o.out;
}

TEST_F(CommandLine, IntegersHaveTheirLimits) {
  const Arguments generate = {"generate", "nowhere"}, eval = {"eval", "nowhere"},
                  build = {"data", "build", text_, "--tokenizer", tokenizer_, "--out", dir_ / "new"},
                  inspect = {"data", "inspect", shard_},
                  learn = {"tokenizer", "train", text_, "--out", dir_ / "new.json"},
                  step = {"bench", "step", "nowhere"}, op = {"bench", "op"};
  const struct {
    Arguments command;
    std::string option;
    std::vector<std::string> values;
    std::string least, most;
  } cases[] = {
      {generate, "--seed", {"-1", "18446744073709551616", "1.0", "0x10", ""}, "0", "18446744073709551615"},
      {generate, "--top-k", {"-1", "99999999999999999999", "2147483648"}, "0", "2147483647"},
      {generate, "--max-tokens", {"0", "-1", "1e3", " 7", "9223372036854775807"}, "1", "2147483647"},
      {eval, "--batch", {"0", "-1"}, "1", "2147483647"},
      {eval, "--sequence-length", {"0", "24x"}, "1", "2147483647"},
      {build, "--seed", {"-1"}, "0", "18446744073709551615"},
      {build, "--shard-tokens", {"1023", "1e6"}, "1024", "9223372036854775807"},
      {inspect, "--show", {"-1"}, "0", "2147483647"},
      {learn, "--vocab-size", {"256", "16777217"}, "257", "16777216"},
      {learn, "--min-count", {"0"}, "1", "9223372036854775807"},
      {step, "--repeats", {"0"}, "1", "2147483647"},
      {step, "--updates", {"0"}, "1", "2147483647"},
      {step, "--warmup", {"-1"}, "0", "2147483647"},
      {op, "--samples", {"0"}, "1", "2147483647"},
  };
  for (const auto& c : cases) {
    for (const std::string& value : c.values) {
      Arguments a = c.command;
      a.insert(a.end(), {c.option, value});
      expect_refusal(program(a), kUsage,
                     {c.option + " is \"" + value + "\"", "a whole number from " + c.least + " to " + c.most});
    }
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ / "new"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "new.json"));
}

TEST_F(CommandLine, QuestionsAreCheckedBeforeTheyAreScored) {
  must(train());
  const std::string file = dir_ / "questions.jsonl";
  const auto refuse = [&](const json& question, const std::vector<std::string>& pieces) {
    write_text(file, json{{"context", "a"}, {"choices", {"b", "c"}}, {"answer", 1}}.dump() + "\n" + question.dump());
    refused({"eval", run_, "--tokenizer", tokenizer_, "--choices", file}, kData, pieces);
  };
  for (const json& answer : {json(0.9), json(1.0), json(-1), json(2), json("0"), json(true), json()}) {
    refuse({{"context", "a"}, {"choices", {"b", "c"}}, {"answer", answer}},
           {file + " line 2", "answer " + answer.dump() + " of 2", "whole number", "from 0"});
  }
  std::string words;
  for (int i = 0; i < 200'000; ++i) words += " word";
  refuse({{"context", words}, {"choices", {"b", "c"}}, {"answer", 1}},
         {file + " line 2", " tokens, the limit is 24", "--sequence-length"});
  write_text(file, json{{"context", words.substr(0, 150)}, {"choices", {"b", "c"}}, {"answer", 1}}.dump());
  refused({"eval", run_, "--tokenizer", tokenizer_, "--choices", file}, kData, {"the limit is 24"});
  must(program({"eval", run_, "--tokenizer", tokenizer_, "--choices", file, "--sequence-length", "200"}));
}

TEST_F(CommandLine, FileErrorsSayTheWayOut) {
  const std::string nope = dir_ / "nope";
  must(train());
  refused({"generate", run_, "--tokenizer", nope}, kData, {nope, "--tokenizer", "kestrel tokenizer train"});
  refused({"tokenizer", "encode", text_, "--tokenizer", nope}, kData, {nope, "kestrel tokenizer train"});
  expect_refusal(train({"data.tokenizer=" + nope}), kData, {nope, "data.tokenizer", "kestrel tokenizer train"});
  write_text(dir_ / "blank.txt", " \n\n");
  refused({"tokenizer", "train", dir_ / "blank.txt", "--out", nope}, kData, {"no text", "--key"});
  expect_refusal(program({"data", "build", dir_ / "blank.txt", "--tokenizer", tokenizer_, "--out", dir_ / "empty"}),
                 kData, {"no text", "--key"});

  const std::string tokens = kGolden + "/expected.safetensors";
  refused({"parity", "--model", run_, "--tokens", tokens, "--out", nope}, kData, {run_, "kestrel export-hf"});
  refused({"import-hf", run_, "--out", nope}, kData, {run_, "kestrel export-hf"});
  refused({"parity", "--model", kGolden, "--tokens", nope, "--out", dir_ / "out"}, kData, {nope, "Check its name"});
  must(program({"export-hf", run_, "--tokenizer", tokenizer_, "--out", dir_ / "exported"}));
  must(program({"import-hf", dir_ / "exported", "--out", dir_ / "imported"}));
  // Weights beside a run's config in place of a model's.
  std::filesystem::copy(run_ + "/config.json", dir_ / "exported/config.json",
                        std::filesystem::copy_options::overwrite_existing);
  refused({"parity", "--model", dir_ / "exported", "--tokens", tokens, "--out", nope}, kUsage,
          {"exported/config.json", "a whole run file", "kestrel export-hf"});
}

TEST_F(CommandLine, SpecialTokensAreUtf8AndNotText) {
  const std::string out = dir_ / "new.json";
  refused({"tokenizer", "train", text_, "--out", out, "--special", "<\xff>"}, kUsage, {"special token 2", "UTF-8"});
  refused({"tokenizer", "train", text_, "--out", out, "--special", "e"}, kUsage, {"special token \"e\"", "<|e|>"});
}
