// kestrel parity: the golden models from the command line, and what it refuses.
#include <algorithm>

#include "program.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(KESTREL_FIXTURES)) {
    const std::string name = e.path().filename().string();
    if (e.is_directory() && name.starts_with("model_")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string folder(const std::string& name) {
  return std::string(KESTREL_FIXTURES) + "/" + name;
}

Arguments parity(const std::string& model, const std::string& tokens, const std::string& out) {
  return {"parity", "--model", model, "--tokens", tokens, "--out", out};
}

class Parity : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(Parity, ReproducesTheGoldenModel) {
  const TempDir dir;
  const std::string golden = folder(GetParam());
  Arguments command = parity(golden, golden + "/expected.safetensors", dir / "out.safetensors");
  command.push_back("--grads");
  must(program(command));

  const SafetensorsFile want(golden + "/expected.safetensors"), got(dir / "out.safetensors");
  // Float64 goldens against fp32: the bounds of tests/src/model/test_model.cpp, three to ten times what plain fp32
  // PyTorch reaches.
  const double loss = *want.tensor("loss").as<double>();
  EXPECT_EQ(got.entry("loss").dtype, DType::f64);
  EXPECT_LE(std::fabs(*got.tensor("loss").as<double>() - loss) / loss, 1e-6);
  EXPECT_EQ(got.entry("logits").shape, want.entry("logits").shape);
  EXPECT_LE(relative_error(got.tensor("logits"), want.tensor("logits")), 3e-5);
  size_t gradients = 0;
  for (const auto& [name, entry] : want.entries()) {
    if (!name.starts_with("grad.")) continue;
    ++gradients;
    ASSERT_TRUE(got.has(name)) << name;
    EXPECT_EQ(got.entry(name).shape, entry.shape) << name;
    EXPECT_LE(relative_error(got.tensor(name), want.tensor(name)), 3e-4) << name;
  }
  EXPECT_GT(gradients, 20u);
  for (const auto& [name, entry] : got.entries()) {
    EXPECT_TRUE(want.has(name)) << name << " has no golden counterpart";
    if (!name.starts_with("load.") || !want.has(name)) continue;
    const Tensor a = got.tensor(name), b = want.tensor(name);
    for (int64_t j = 0; j < a.numel(); ++j) EXPECT_EQ(a.i32()[j], b.i32()[j]) << name << " expert " << j;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Parity, ::testing::ValuesIn(models()), [](const auto& p) { return p.param; });

TEST(ParityErrors, TokensFileOfAnotherKind) {
  const TempDir dir;
  const std::string golden = folder("model_k3"), out = dir / "out.safetensors";
  expect_refusal(program(parity(golden, golden + "/model.safetensors", out)), 3, {"model.safetensors", "tokens"});
  expect_refusal(program(parity(golden, golden + "/config.json", out)), 3, {"config.json"});
  expect_refusal(program(parity(golden, dir / "absent.safetensors", out)), 3, {"absent.safetensors"});
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(ParityErrors, IdsBeyondTheVocabulary) {
  const TempDir dir;
  std::vector<int32_t> tokens(8, 3), targets(8, 3);
  tokens[5] = 131;  // the vocabulary of model_k3 is [0, 131)
  const auto write = [&] {
    write_safetensors(dir / "tokens.safetensors",
                      {{"tokens", Tensor::of(tokens.data(), {2, 4})}, {"targets", Tensor::of(targets.data(), {2, 4})}});
  };
  write();
  const Arguments command = parity(folder("model_k3"), dir / "tokens.safetensors", dir / "out.safetensors");
  expect_refusal(program(command), 3, {"\"tokens\"", "131", "position 5", "[0, 131)"});
  tokens[5] = 3;
  targets[2] = -7;
  write();
  expect_refusal(program(command), 3, {"\"targets\"", "-7", "position 2", "-100"});
  EXPECT_FALSE(std::filesystem::exists(dir / "out.safetensors"));
}

TEST(ParityErrors, WeightsOfAnotherModel) {
  const TempDir dir;
  std::filesystem::copy(folder("model_k3") + "/config.json", dir / "config.json");
  std::filesystem::copy(folder("model_standard_residual") + "/model.safetensors", dir / "model.safetensors");
  expect_refusal(program(parity(dir.path(), folder("model_k3") + "/expected.safetensors", dir / "out.safetensors")), 3,
                 {"are not this model's", "missing", "_res_", "config.json"});
}

TEST(ParityErrors, DeviceThatIsNotThere) {
  const TempDir dir;
  const std::string golden = folder("model_k3");
  Arguments command = parity(golden, golden + "/expected.safetensors", dir / "out.safetensors");
  command.insert(command.end(), {"--device", "cuda"});
  // A machine without a GPU, or a build without the back end: exit code 4 either way.
  CommandOptions no_gpu;
  no_gpu.setting["CUDA_VISIBLE_DEVICES"] = "";
  expect_refusal(program(command, no_gpu), 4, {"cuda", "cpu"});
  command.back() = "tpu";
  expect_refusal(program(command, no_gpu), 2, {"tpu", "cpu", "cuda"});
}
