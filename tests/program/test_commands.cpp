// The commands around training: help, evaluation, exchange with Hugging Face's layout.
#include <unistd.h>

#include "kernels/core/device.h"
#include "program.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

const Arguments kCommands = {"train",  "eval", "generate", "data",  "tokenizer", "import-hf", "export-hf",
                             "parity", "plan", "report",   "bench", "config",    "doctor"};

// A run of real text in `folder`/run, six steps.
void train_on_text(const std::string& folder) {
  make_text_data(folder);
  json run = tiny_run(folder + "/data/train-*.safetensors", folder + "/run");
  run["model"]["vocab_size"] = 300;
  run["data"]["validation"] = {folder + "/data/validation-*.safetensors"};
  run["data"]["tokenizer"] = folder + "/tokenizer.json";
  run["eval"] = {{"every", 6}, {"batches", 0}};
  write_text(folder + "/run.json", run.dump());
  must(program({"train", folder + "/run.json"}));
}

}  // namespace

TEST(Help, EveryCommandHasOneWithAnExample) {
  const Outcome top = must(program({"--help"}));
  for (const std::string& c : kCommands) {
    EXPECT_NE(top.out.find("\n  " + c), std::string::npos) << c;
    const Outcome o = must(program({c, "--help"}));
    EXPECT_NE(o.out.find("Example:\n  kestrel " + c), std::string::npos) << o.out;
  }
}

TEST(Help, ExamplesOnShippedFilesWork) {
  CommandOptions here;
  here.folder = KESTREL_SOURCE_DIR;
  const TempDir dir;
  for (const std::string line :
       {"kestrel config configs/quickstart.json train.steps=200", "kestrel config --explain gate_lower_bound",
        "kestrel plan configs/k3_2p8t.json", "kestrel doctor"}) {
    must(shell(line, here));
  }
  must(shell(
      "kestrel parity --model tests/fixtures/model_k3 --tokens tests/fixtures/model_k3/expected.safetensors --out " +
          (dir / "p.safetensors") + " --grads",
      here));
  must(shell("kestrel import-hf tests/fixtures/model_k3 --out " + (dir / "imported"), here));
  must(
      shell("kestrel bench step configs/quickstart.json train.micro_batch_size=1 train.global_batch_size=2 --repeats 1 "
            "--updates 1 --warmup 0",
            here));
}

TEST(Help, EveryScriptHasOneAndRefusesWhatItDoesNotKnow) {
  int scripts = 0;
  for (const auto& e : std::filesystem::directory_iterator(std::string(KESTREL_SOURCE_DIR) + "/scripts")) {
    const std::string name = e.path().filename().string();
    // The others are sourced by these, or written in Python.
    if (!name.ends_with(".sh") || access(e.path().c_str(), X_OK) != 0) continue;
    ++scripts;
    const Outcome help = must(shell("exec " + e.path().string() + " --help"));
    EXPECT_NE(help.out.find("\n    scripts/" + name), std::string::npos) << help.out;
    EXPECT_LT(help.seconds, 5) << name << " did more than show its help";
    if (name == "test.sh") continue;  // what it does not know is ctest's
    const Outcome unknown = shell("exec " + e.path().string() + " --no-such-option");
    EXPECT_EQ(unknown.code, 2) << unknown.all();
    EXPECT_NE(unknown.err.find("scripts/" + name), std::string::npos) << unknown.err;
  }
  EXPECT_GE(scripts, 5);
}

TEST(Commands, EvaluationAgreesWithTheTrainers) {
  const TempDir dir;
  train_on_text(dir.path());
  const json last = metrics_of(dir / "run").back();
  const json eval = json::parse(must(program({"eval", dir / "run", "--json"})).out);
  // Other batch sizes sum the same fp32 losses in fp64: only the products' rounding by batch remains.
  EXPECT_NEAR(eval["loss"].get<double>(), last["val_loss"].get<double>(), 1e-5);
  EXPECT_NEAR(eval["bits_per_byte"].get<double>(), last["val_bits_per_byte"].get<double>(), 1e-5);
  EXPECT_EQ(eval["targets"], last["val_targets"]);

  write_text(dir / "choices.jsonl", R"({"context": "And God", "choices": [" said", "zqzq"], "answer": 0}
{"context": "In the", "choices": ["xkqj", " beginning"], "answer": 1}
)");
  const json choices =
      json::parse(must(program({"eval", dir / "run", "--choices", dir / "choices.jsonl", "--json"})).out);
  EXPECT_EQ(choices["questions"], 2);
  EXPECT_GE(choices["accuracy"].get<double>(), 0.0);
  EXPECT_LE(choices["accuracy"].get<double>(), 1.0);
  write_text(dir / "bad.jsonl", "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}\n");
  expect_refusal(program({"eval", dir / "run", "--choices", dir / "bad.jsonl"}), 3, {"bad.jsonl line 1", "answer 2"});
}

TEST(Commands, ExportImportAndParityCarryTheSameModel) {
  const TempDir dir;
  train_on_text(dir.path());
  must(program({"export-hf", dir / "run", "--out", dir / "fp32"}));
  must(program({"export-hf", dir / "run", "--out", dir / "bf16", "--dtype", "bf16"}));
  EXPECT_EQ(read_text(dir / "fp32/tokenizer.json"), read_text(dir / "tokenizer.json"));
  must(program({"import-hf", dir / "fp32", "--out", dir / "again"}));
  must(program({"import-hf", dir / "bf16", "--out", dir / "again_bf16"}));
  const SafetensorsFile a(dir / "fp32/model.safetensors"), b(dir / "again/model.safetensors"),
      c(dir / "again_bf16/model.safetensors");
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (const auto& [name, entry] : a.entries()) {
    EXPECT_EQ(std::memcmp(entry.data, b.entry(name).data, static_cast<size_t>(entry.bytes)), 0) << name;
    EXPECT_LE(relative_error(c.tensor(name), a.tensor(name)), 4e-3) << name;  // bf16 keeps eight bits: 2^-9 a rounding
  }
  const auto loss = [&](const std::string& model) {
    std::vector<int32_t> ids(48), targets(48);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>((7 * i + 1) % 300), targets[i] = static_cast<int32_t>((7 * i + 8) % 300);
    write_safetensors(dir / "tokens.safetensors",
                      {{"tokens", Tensor::of(ids.data(), {2, 24})}, {"targets", Tensor::of(targets.data(), {2, 24})}});
    must(program(
        {"parity", "--model", model, "--tokens", dir / "tokens.safetensors", "--out", dir / "out.safetensors"}));
    return *SafetensorsFile(dir / "out.safetensors").tensor("loss").as<double>();
  };
  EXPECT_EQ(loss(dir / "fp32"), loss(dir / "again"));
  EXPECT_NEAR(loss(dir / "bf16"), loss(dir / "fp32"), 0.02);
  expect_refusal(program({"export-hf", dir / "run", "--out", dir / "fp32"}), 3, {"fp32"});  // never overwritten
}

TEST(Commands, GenerationStreamsRepeatsAndRefuses) {
  const TempDir dir;
  train_on_text(dir.path());
  const Arguments greedy = {"generate", dir / "run", "--prompt", "In the", "--max-tokens", "12", "--temperature", "0"};
  const Outcome a = must(program(greedy)), b = must(program(greedy));
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.out.rfind("In the", 0), 0u) << a.out;
  const auto draw = [&](const std::string& seed) {
    return must(program({"generate", dir / "run", "--prompt", "In the", "--max-tokens", "24", "--ignore-eos", "--seed",
                         seed}))
        .out;
  };
  EXPECT_EQ(draw("1"), draw("1"));
  EXPECT_NE(draw("1"), draw("2"));
  expect_refusal(program({"generate", dir / "run", "--top-p", "0"}), 2, {"top-p", "0", "(0, 1]"});
  expect_refusal(program({"generate", dir / "nowhere"}), 3, {"nowhere"});

  for (const char* bad : {"", "inf", "nan", "-1", "1x"}) {
    expect_refusal(program({"generate", dir / "run", "--temperature", bad}), 2,
                   {text("--temperature is \"", bad, "\""), "0 (greedy) or more"});
  }
  for (const char* bad : {"", "1", "-0.1", "nan", "half"}) {
    expect_refusal(program({"data", "build", "--tokenizer", dir / "tokenizer.json", "--out", dir / "other",
                            "--validation-fraction", bad, dir / "text.txt"}),
                   2, {text("--validation-fraction is \"", bad, "\""), "[0, 1)"});
  }

  CommandOptions no_gpu;
  no_gpu.setting["CUDA_VISIBLE_DEVICES"] = "";
  expect_refusal(program({"generate", dir / "run", "--device", "cuda"}, no_gpu), 4, {"--device cuda", "--device cpu"});
  expect_refusal(program({"generate", dir / "run", "--device", "cpu", "--precision", "bf16"}), 2, {"bf16", "fp32"});
  expect_refusal(program({"generate", dir / "run", "--device", "tpu"}), 2, {"tpu", "cpu", "cuda"});
}

TEST(Report, OfWhatIsNoRunIsRefused) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "run");
  write_text(dir / "run/report.html", "old");
  for (const std::string junk : {"", "junk\n", "junk", "{\"step\":1"}) {
    write_text(dir / "run/metrics.jsonl", junk);
    expect_refusal(program({"report", dir / "run"}), 3, {dir / "run/metrics.jsonl"});
  }
  EXPECT_EQ(read_text(dir / "run/report.html"), "old");
  write_text(dir / "run/metrics.jsonl", "{\"step\":1,\"loss\":3}\n{\"step\":2,\"lo");
  const Outcome o = must(program({"report", dir / "run"}));
  EXPECT_NE(o.err.find("warning: " + (dir / "run/metrics.jsonl") + ":2: "), std::string::npos) << o.err;
  EXPECT_EQ(read_text(dir / "run/report.html").rfind("<!doctype html>", 0), 0u);
}

TEST(Bench, OperationsHaveCountedBytesAndABound) {
  const json j = json::parse(
      must(program({"bench", "op", "rms_norm_forward", "kda_backward", "--device", "cpu", "--json", "--samples", "1"}))
          .out);
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[0]["operation"], "rms_norm_forward");
  // x and y, 1024 x 256 floats each.
  EXPECT_EQ(j[0]["bytes"].get<double>(), 2.0 * 1024 * 256 * 4);
  EXPECT_EQ(j[0]["flops"].get<double>(), 0.0);
  for (const json& t : j) {
    EXPECT_GT(t["median_ms"].get<double>(), 0.0);
    EXPECT_GT(t["fraction_of_bound"].get<double>(), 0.0);
    EXPECT_GT(t["copy_bytes_per_s"].get<double>(), 0.0);
  }
  const json shaped = json::parse(
      must(program({"bench", "op", "rms_norm_forward", "--shape", "N=64,D=32", "--device", "cpu", "--json"})).out);
  EXPECT_EQ(shaped[0]["bytes"].get<double>(), 2.0 * 64 * 32 * 4);
}

TEST(Bench, EveryOperationRuns) {
  const Outcome o = must(program({"bench", "op", "--device", "cpu", "--samples", "1"}));
  for (const char* name : {"copy", "residual_site_backward", "attention_backward", "grouped_linear_backward_weight",
                           "linear_cross_entropy", "adamw", "muon", "quantile_histogram"}) {
    EXPECT_NE(o.out.find(std::string("\n") + name + " "), std::string::npos) << name;
  }
}

TEST(Bench, BadRequestsAreRefused) {
  expect_refusal(program({"bench", "op", "softmax"}), 2, {"softmax", "Known:", "rms_norm_forward"});
  expect_refusal(program({"bench", "op", "copy", "--shape", "X=3"}), 2, {"no dimension \"X\"", "N, D"});
  expect_refusal(program({"bench", "op", "copy", "--shape", "N=0"}), 2, {"N is \"0\"", "from 1"});
  expect_refusal(program({"bench", "op", "copy", "--shape", "N=12x"}), 2, {"N is \"12x\""});
  expect_refusal(program({"bench", "op", "copy", "add_into", "--shape", "N=2"}), 2, {"one operation"});
  expect_refusal(program({"bench", "op", "copy", "--device", "cpu", "--dtype", "bf16"}), 2, {"bf16", "fp32"});
  expect_refusal(program({"bench", "op", "route_forward", "--device", "cpu", "--shape", "E=4,k=5"}), 2,
                 {"k is 5", "E=4"});
  const auto shaped = [](const std::string& op, const std::string& shape) {
    return program({"bench", "op", op, "--device", "cpu", "--shape", shape});
  };
  expect_refusal(shaped("kda_forward", "B=1,T=2147483647,H=2147483647,K=128"), 2, {"T=2147483647", "2^53", "Lower"});
  expect_refusal(shaped("kda_forward", "K=2048"), 2, {"K is \"2048\"", "to 1024"});
  expect_refusal(shaped("quantile_histogram", "bins=1048577"), 2, {"bins is \"1048577\"", "to 1048576"});
  expect_refusal(shaped("dispatch_plan", "N=2147483647"), 2, {"N=2147483647", "2147483647 have a number"});
  // 2^50 bytes of operands are more than a machine has.
  expect_refusal(shaped("copy", "N=1073741824,D=131072"), 4, {"bytes of host memory", "--shape"});
}

TEST(Profile, TablesNameOperationsAndPhases) {
  const TempDir dir;
  train_on_text(dir.path());
  json run = json::parse(read_text(dir / "run.json"));
  run["log"]["dir"] = dir / "profiled";
  write_text(dir / "profiled.json", run.dump());
  const Outcome o = must(program({"train", dir / "profiled.json", "--profile"}));
  for (const char* word : {"forward ", "backward ", "update ", "evaluate ", "kda_backward", "grouped_linear_forward",
                           "muon_step", "sum_of_squares", "ms a step"}) {
    EXPECT_NE(o.out.find(word), std::string::npos) << word << "\n" << o.out;
  }
}

TEST(Doctor, SaysWhichBackEndRuns) {
  const Outcome o = must(program({"doctor"}));
  const DeviceCount gpus = device_count();
  const std::string expected = !kBuiltWithCuda  ? "not built in: the CPU back end only"
                               : gpus.count > 0 ? "built in; "
                                                : "built in, but no GPU: " + gpus.reason;
  EXPECT_NE(o.out.find(expected), std::string::npos) << o.out;
}
