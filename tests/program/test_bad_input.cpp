// What a user can get wrong: the exit code, a message with the value, the limit and the way out, nothing overwritten.
#include <unistd.h>

#include "program.h"
#include "src/checkpoint/checkpoint.h"
#include "src/data/shard.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

constexpr int kUsage = 2, kData = 3;

class BadInput : public ::testing::Test {
 protected:
  BadInput() { write_tokens(shard_, 2000); }

  json run() const { return tiny_run(shard_, out_); }
  Outcome train(const json& run, const Arguments& overrides = {}, const CommandOptions& options = {}) const {
    write_text(file_, run.dump(2));
    Arguments a = {"train", file_};
    a.insert(a.end(), overrides.begin(), overrides.end());
    return program(a, options);
  }
  Outcome with(const std::string& pointer, const json& value) const {
    json j = run();
    j[json::json_pointer(pointer)] = value;
    return train(j);
  }
  // Refused before anything is made.
  void refused(const Outcome& o, int code, const std::vector<std::string>& pieces) const {
    expect_refusal(o, code, pieces);
    EXPECT_FALSE(std::filesystem::exists(out_)) << "the run directory was made";
  }
  void use_shard(const std::string& bytes) const { write_text(shard_, bytes); }

  TempDir dir_;
  std::string shard_ = dir_ / "train.safetensors", out_ = dir_ / "run", file_ = dir_ / "run.json";
};

std::string safetensors_text(const std::string& header, const std::string& data) {
  const uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

std::string llm_c_text(int32_t tokens_said, size_t tokens_there) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = tokens_said;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + std::string(2 * tokens_there, '\1');
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- the run file

TEST_F(BadInput, UnknownKey) {
  refused(with("/train/stepz", 3), kUsage, {file_, "stepz", "steps"});
  refused(with("/model/balancing/bin", 3), kUsage, {"model.balancing.bin", "bins"});
  refused(with("/trian", json::object()), kUsage, {"trian", "train"});
  refused(train(run(), {"train.stepz=3"}), kUsage, {"train.stepz", "steps"});
}

TEST_F(BadInput, DuplicateKey) {
  std::string content = run().dump(2);
  const std::string key = "\"hidden_size\": 32,";
  const size_t at = content.find(key);
  ASSERT_NE(at, std::string::npos);
  content.insert(at, "\"hidden_size\": 64,\n");
  write_text(file_, content);
  refused(program({"train", file_}), kUsage, {"hidden_size", "twice"});
}

TEST_F(BadInput, MistypedValue) {
  refused(with("/model/hidden_size", "32"), kUsage, {"model.hidden_size", "\"32\"", "whole number"});
  refused(with("/model/residual", "plain"), kUsage, {"model.residual", "plain", "block_attnres", "standard"});
  refused(with("/data/shuffle", 1), kUsage, {"data.shuffle", "1", "true"});
  refused(with("/train/steps", 6.5), kUsage, {"train.steps", "6.5"});
}

TEST_F(BadInput, OutOfRange) {
  refused(with("/model/linear_attn_config/gate_lower_bound", -7), kUsage, {"gate_lower_bound", "-7", "-5.9", "null"});
  refused(with("/optimizer/momentum", 1), kUsage, {"optimizer.momentum", "1"});
  refused(with("/train/steps", 0), kUsage, {"train.steps", "0", "1"});
}

TEST_F(BadInput, CombinationsThatCannotBe) {
  refused(with("/model/num_experts_per_token", 4), kUsage, {"num_experts_per_token", "is 4", "4 experts", "at most 3"});
  refused(with("/model/num_experts_per_token", 1), kUsage, {"num_experts_per_token", "moe_renormalize"});
  refused(with("/model/num_key_value_heads", 1), kUsage, {"num_key_value_heads", "num_attention_heads"});
  refused(with("/train/micro_batch_size", 3), kUsage, {"micro_batch_size", "3", "4", "divisor"});
  refused(with("/schedule/warmup_steps", 6), kUsage, {"schedule.warmup_steps", "6", "at most 5"});
}

TEST_F(BadInput, NotJsonAndNotThere) {
  write_text(file_, "{ \"model\": {,} }");
  refused(program({"train", file_}), kUsage, {file_});
  refused(program({"train", dir_ / "absent.json"}), kUsage, {"absent.json"});
  refused(program({"train"}), kUsage, {"RUN.json"});
  refused(program({"trane", file_}), kUsage, {"trane", "train"});
}

TEST_F(BadInput, CpuGemmThatIsNotOne) {
  CommandOptions o;
  o.setting["KESTREL_CPU_GEMM"] = "mkl";
  refused(train(run(), {}, o), kUsage, {"KESTREL_CPU_GEMM", "mkl", "own", "openblas"});
}

// ----------------------------------------------------------------------------------------------------------- the data

TEST_F(BadInput, NoTrainingData) {
  refused(with("/data/train", json::array()), kUsage, {"data.train", "kestrel data build"});
  refused(with("/data/train", {dir_ / "absent-*.safetensors"}), kData, {"absent-*.safetensors"});
}

TEST_F(BadInput, ShardWhoseHeaderLies) {
  const std::string metadata = R"("__metadata__":{"vocab_size":"64"},)";
  use_shard(safetensors_text("{" + metadata + R"("tokens":{"dtype":"U16","shape":[500],"data_offsets":[0,1000]}})",
                             std::string(600, '\1')));
  refused(train(run()), kData, {shard_});
  use_shard(safetensors_text("{" + metadata + R"("tokens":{"dtype":"U16","shape":[500],"data_offsets":[0,600]}})",
                             std::string(600, '\1')));
  refused(train(run()), kData, {shard_, "tokens"});
  use_shard(safetensors_text("{" + metadata, ""));
  refused(train(run()), kData, {shard_});
  // A length that points far beyond the file.
  std::string huge = safetensors_text("{}", "");
  huge[6] = '\x7f';
  use_shard(huge);
  refused(train(run()), kData, {shard_});

  json j = run();
  j["data"]["train"] = {dir_ / "llmc.bin"};
  write_text(dir_ / "llmc.bin", llm_c_text(500, 300));
  refused(train(j), kData, {"llmc.bin", "500 tokens", "1624"});
  write_text(dir_ / "llmc.bin", llm_c_text(-1, 300));
  refused(train(j), kData, {"llmc.bin", "-1"});
}

TEST_F(BadInput, ShardWithoutVocabulary) {
  use_shard(
      safetensors_text(R"({"tokens":{"dtype":"U16","shape":[300],"data_offsets":[0,600]}})", std::string(600, '\1')));
  refused(train(run()), kData, {shard_, "vocab_size"});
}

TEST_F(BadInput, EmptyShard) {
  use_shard("");
  refused(train(run()), kData, {shard_});
  use_shard(safetensors_text(
      R"({"__metadata__":{"vocab_size":"64"},"tokens":{"dtype":"U16","shape":[0],"data_offsets":[0,0]}})", ""));
  refused(train(run()), kData, {shard_, "no tokens"});
}

TEST_F(BadInput, ShardShorterThanARow) {
  write_tokens(shard_, 24);  // a row of 24 needs one more, its last target
  refused(train(run()), kData, {shard_, "24 tokens", "25", "data.sequence_length"});
}

TEST_F(BadInput, IdsBeyondTheVocabulary) {
  ShardContents c;
  c.tokens.assign(300, 5);
  c.tokens[200] = 70;
  c.vocab_size = 64;
  write_shard(shard_, c);
  refused(train(run()), kData, {shard_, "token 200", "70", "64"});
  write_tokens(shard_, 300, 80);
  refused(train(run()), kData, {shard_, "80", "64", "model.vocab_size"});
}

TEST_F(BadInput, TokenizerThatIsNotTheDatas) {
  make_text_data(dir_.path());
  must(program({"tokenizer", "train", "--vocab-size", "290", "--out", dir_ / "other.json", dir_ / "text.txt"}));
  json j = run();
  j["model"]["vocab_size"] = 300;
  j["data"]["train"] = {dir_ / "data/train-00000.safetensors"};
  j["data"]["tokenizer"] = dir_ / "other.json";
  refused(train(j), kData, {"train-00000.safetensors", "tokenizer", "kestrel data build"});
  j["data"]["tokenizer"] = dir_ / "tokenizer.json";
  j["model"]["vocab_size"] = 299;
  refused(train(j), kUsage, {"300", "299", "model.vocab_size"});
  j["data"]["tokenizer"] = dir_ / "absent.json";
  refused(train(j), kData, {"absent.json"});
}

TEST_F(BadInput, DocumentMaskWithoutDocuments) {
  write_text(dir_ / "llmc.bin", llm_c_text(300, 300));
  json j = run();
  j["data"]["train"] = {dir_ / "llmc.bin"};
  j["model"]["vocab_size"] = 300;
  j["model"]["document_mask"] = true;
  refused(train(j), kData, {"model.document_mask", "document_starts", "kestrel data build"});
}

// ---------------------------------------------------------------------------------------------------- the checkpoints

namespace {

// A run of six steps with checkpoints after 2, 4 and 6.
class BadCheckpoint : public BadInput {
 protected:
  BadCheckpoint() { must(train(run(), every_)); }

  std::string folder(int step) const { return out_ + "/checkpoints/step_0000000" + std::to_string(step); }
  std::string shard(int step) const { return folder(step) + "/shard-00000-00000.safetensors"; }
  void flip_bit(const std::string& path, int64_t from_the_end) const {
    std::string bytes = read_text(path);
    bytes[bytes.size() - static_cast<size_t>(from_the_end)] ^= 4;
    write_text(path, bytes);
  }
  void truncate(const std::string& path) const { write_text(path, read_text(path).substr(0, 1000)); }
  Outcome longer(const Arguments& more = {}) const {
    Arguments a = every_;
    a.push_back("train.steps=8");
    a.insert(a.end(), more.begin(), more.end());
    return train(run(), a);
  }

  const Arguments every_ = {"checkpoint.every=2", "checkpoint.keep=0"};
};

}  // namespace

TEST_F(BadCheckpoint, FlippedBitFallsBackToTheOlderOneAndSaysSo) {
  flip_bit(shard(6), 5000);
  const std::string damaged = read_text(shard(6));
  const Outcome o = must(longer());
  EXPECT_NE(o.all().find("checkpoint not used: "), std::string::npos) << o.all();
  EXPECT_NE(o.all().find("step_00000006"), std::string::npos) << o.all();
  EXPECT_NE(o.all().find("resuming from " + folder(4)), std::string::npos) << o.all();
  EXPECT_EQ(metrics_of(out_).size(), 8u);
  EXPECT_NE(o.all().find("kept as " + folder(6) + ".damaged"), std::string::npos) << o.all();
  EXPECT_EQ(read_text(folder(6) + ".damaged/shard-00000-00000.safetensors"), damaged);
  // The steps after 4 were done again: step 6 is whole again, and step 8 is that of a run that saw no damage.
  EXPECT_NE(read_text(shard(6)), damaged);
  json undisturbed = run();
  undisturbed["log"]["dir"] = dir_ / "undisturbed";
  Arguments steps = every_;
  steps.push_back("train.steps=6");
  must(train(undisturbed, steps));
  steps.back() = "train.steps=8";
  must(train(undisturbed, steps));
}

TEST_F(BadCheckpoint, TruncatedFallsBackTwice) {
  truncate(shard(6));
  std::filesystem::remove(folder(4) + "/train_state.json");
  const Outcome o = must(longer());
  EXPECT_NE(o.all().find("step_00000006"), std::string::npos) << o.all();
  EXPECT_NE(o.all().find("train_state.json"), std::string::npos) << o.all();
  EXPECT_NE(o.all().find("resuming from " + folder(2)), std::string::npos) << o.all();
}

TEST_F(BadCheckpoint, NoGoodOneLeft) {
  for (int step : {2, 4, 6}) truncate(shard(step));
  const auto before = files_of(out_);
  expect_refusal(longer({"checkpoint.resume=must"}), kData,
                 {"checkpoint.resume", "must", out_ + "/checkpoints", "step_00000002", "step_00000004", "step_00000006",
                  "checkpoint.resume=never"});
  expect_refusal(longer(), kData, {"checkpoint.resume", "auto", "step_00000006", "checkpoint.resume=never"});
  EXPECT_EQ(files_of(out_), before);
  must(longer({"checkpoint.resume=never"}));
  EXPECT_EQ(metrics_of(out_).size(), 8u);
  expect_refusal(train(run(), {"checkpoint.resume=must", "checkpoint.dir=" + (dir_ / "nowhere")}), kData,
                 {"checkpoint.resume", "nowhere"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "nowhere"));
}

TEST_F(BadCheckpoint, OfAnotherModel) {
  const auto before = files_of(out_);
  json j = run();
  j["model"]["num_experts"] = 8;
  j["model"]["residual"] = "standard";
  expect_refusal(train(j, {"train.steps=8"}), kData,
                 {"another model", "model.num_experts: 4 there, 8 here",
                  "model.residual: \"block_attnres\" there, \"standard\" here", "checkpoint.resume=never"});
  EXPECT_EQ(files_of(out_), before);
}

TEST_F(BadCheckpoint, OfOtherDataOrAnotherOptimizer) {
  const auto before = files_of(out_);
  expect_refusal(longer({"data.seed=1"}), kData, {"data.seed", "= 0", "1", "checkpoint.resume=never"});
  expect_refusal(longer({"data.sequence_length=23"}), kData, {"data.sequence_length", "24", "23"});
  expect_refusal(longer({"optimizer.type=adamw"}), kData, {"optimizer.type", "muon", "adamw", "train.init_from"});
  write_tokens(shard_, 2000, 64, 99);
  expect_refusal(longer(), kData, {"training data", "checkpoint.resume=never"});
  EXPECT_EQ(files_of(out_), before);
}

TEST_F(BadCheckpoint, EvalAndGenerateRefuseTheDamaged) {
  flip_bit(shard(6), 5000);
  expect_refusal(program({"eval", folder(6), "--data", shard_}), kData, {"step_00000006"});
  for (int step : {2, 4}) flip_bit(shard(step), 5000);
  expect_refusal(program({"eval", out_, "--data", shard_}), kData, {out_, "no good checkpoint", "step_00000002"});
  expect_refusal(program({"eval", dir_.path(), "--data", shard_}), kData, {dir_.path(), "run directory"});
}

// ------------------------------------------------------------------------------------------------ places to write into

TEST_F(BadInput, RunDirectoryThatCannotBe) {
  write_text(dir_ / "file", "a regular file\n");
  json j = run();
  j["log"]["dir"] = dir_ / "file/run";
  expect_refusal(train(j), kData, {dir_ / "file/run", "run directory", "log.dir"});
  j["log"]["dir"] = dir_ / "file";
  expect_refusal(train(j), kData, {dir_ / "file", "log.dir"});
  EXPECT_EQ(read_text(dir_ / "file"), "a regular file\n");
}

TEST_F(BadInput, CheckpointDirectoryThatCannotBe) {
  write_text(dir_ / "file", "a regular file\n");
  expect_refusal(train(run(), {"checkpoint.dir=" + (dir_ / "file/checkpoints")}), kData, {dir_ / "file"});
  EXPECT_EQ(read_text(dir_ / "file"), "a regular file\n");
}

TEST_F(BadCheckpoint, DiskThatFillsWhileSaving) {
  const auto before = files_of(out_ + "/checkpoints");
  CommandOptions full;
  full.file_limit = 100 * 1024;  // logs fit, the checkpoint of about 400 KiB does not
  ASSERT_GT(std::filesystem::file_size(shard(6)), static_cast<uintmax_t>(full.file_limit));
  Arguments more = every_;
  more.push_back("train.steps=8");
  expect_refusal(train(run(), more, full), kData, {out_ + "/checkpoints", "File too large"});
  EXPECT_EQ(files_of(out_ + "/checkpoints"), before);  // no half checkpoint, no leftover, `latest` as it was
  const Outcome o = must(longer());                    // space again: on it goes
  EXPECT_NE(o.all().find("resuming from " + folder(6)), std::string::npos) << o.all();
}

TEST_F(BadInput, DiskThatFillsInOtherCommands) {
  CommandOptions full;
  full.file_limit = 20 * 1024;
  const std::string golden = std::string(KESTREL_FIXTURES) + "/model_k3";
  expect_refusal(program({"parity", "--model", golden, "--tokens", golden + "/expected.safetensors", "--out",
                          dir_ / "out.safetensors"},
                         full),
                 kData, {dir_ / "out.safetensors"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out.safetensors"));
  expect_refusal(program({"import-hf", golden, "--out", dir_ / "imported"}, full), kData, {dir_ / ".tmp-imported"});
  EXPECT_FALSE(std::filesystem::exists(dir_ / "imported/config.json"));
}

TEST_F(BadInput, MemoryThatCannotBeHad) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer's shadow needs more address space than the limit";
#endif
  write_text(file_, run().dump());
  // 288 M tokens: 4.3 GiB for a step's ids and losses.  The limit leaves room for a CUDA build's libraries.
  const Outcome o =
      shell("ulimit -v 4000000; exec kestrel train --dry-run " + file_ + " train.global_batch_size=12000000");
  expect_refusal(o, 4, {"4.29", "this machine has 3.81", "Lower"});
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(BadInput, OutputThatIsLost) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  make_text_data(dir_.path());
  json j = tiny_run(dir_ / "data/train-*.safetensors", out_);
  j["model"]["vocab_size"] = 300;
  j["data"]["validation"] = {dir_ / "data/validation-*.safetensors"};
  j["data"]["tokenizer"] = dir_ / "tokenizer.json";
  must(train(j));
  const std::string golden = std::string(KESTREL_FIXTURES) + "/model_k3";
  CommandOptions here;
  here.folder = dir_.path();
  const auto lost = [&](const std::string& command) { return shell("exec kestrel " + command + " > /dev/full", here); };
  for (const std::string& command : {
           std::string("--help"),
           std::string("plan --help"),
           std::string("plan run.json"),
           std::string("plan run.json --json"),
           std::string("config run.json"),
           std::string("config --schema"),
           std::string("config --reference"),
           std::string("config --explain train.steps"),
           std::string("doctor"),
           std::string("train run.json --dry-run"),
           std::string("eval run"),
           std::string("eval run --json"),
           std::string("generate run --prompt In --max-tokens 2"),
           std::string("data inspect data/train-00000.safetensors"),
           std::string("data build --tokenizer tokenizer.json --split-documents line --out again text.txt"),
           std::string("tokenizer train --vocab-size 300 --out again.json text.txt"),
           std::string("tokenizer encode --tokenizer tokenizer.json text.txt"),
           std::string("report run"),
           std::string("bench op copy --device cpu --samples 1"),
           std::string("export-hf run --out exported"),
           "import-hf " + golden + " --out imported",
           "parity --model " + golden + " --tokens " + golden + "/expected.safetensors --out p.safetensors",
       }) {
    SCOPED_TRACE(command);
    expect_refusal(lost(command), kData, {"standard output"});
  }
  EXPECT_EQ(lost("train run.json train.steps=7").code, kData);  // the log, line by line
}

TEST_F(BadInput, DeviceThatIsNotThere) {
  CommandOptions no_gpu;
  no_gpu.setting["CUDA_VISIBLE_DEVICES"] = "";
  refused(train(run(), {"train.device=cuda"}, no_gpu), 4, {"train.device", "cuda", ". Set train.device to", "cpu"});
}
