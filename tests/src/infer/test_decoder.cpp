// Decoding with state against the full forward, and the choice of tokens.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "src/infer/decoder.h"
#include "src/infer/sampler.h"
#include "src/model/weights.h"
#include "tests/src/train/run_files.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(KESTREL_FIXTURES)) {
    if (e.is_directory() && e.path().filename().string().starts_with("model_")) names.push_back(e.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

int32_t argmax(const float* x, int64_t n) {
  return static_cast<int32_t>(std::max_element(x, x + n) - x);
}

// Logits [T, vocab] of one forward over the whole sequence.
std::vector<float> full_logits(Model& model, const std::vector<int32_t>& ids) {
  const int64_t T = static_cast<int64_t>(ids.size()), V = model.config().vocab_size;
  std::vector<float> out(static_cast<size_t>(T * V));
  const MicroBatch batch{Tensor::of(ids.data(), {1, T}), {}, {}};
  const Tensor logits = Tensor::of(out.data(), {T, V});
  const auto run = [&](Stream& s) { model.logits(s, batch, logits, {}); };
  Arena arena(Device::cpu, planned_bytes(Device::cpu, run));
  Stream s(arena);
  run(s);
  return out;
}

class Variant : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(Variant, GreedyDecodingEqualsTheFullForward) {
  const std::string dir = std::string(KESTREL_FIXTURES) + "/" + GetParam();
  Model model(parse_model_config(read_text(dir + "/config.json"), dir));
  model.parameters().allocate(Device::cpu, DType::f32, false);
  load_weights(model.parameters(), WeightSource(dir));
  const int64_t V = model.config().vocab_size;

  constexpr size_t kPrompt = 7, kTotal = 207;
  std::vector<int32_t> ids;
  for (size_t i = 0; i < kPrompt; ++i) ids.push_back(static_cast<int32_t>((17 * i + 3) % static_cast<size_t>(V)));
  Decoder decoder(model, kTotal);
  std::vector<std::vector<float>> steps;
  auto logits = decoder.feed(ids);
  while (ids.size() < kTotal) {
    steps.emplace_back(logits.begin(), logits.end());
    ids.push_back(argmax(logits.data(), V));
    if (ids.size() < kTotal) logits = decoder.feed(std::span(&ids.back(), 1));
  }
  const std::vector<float> full = full_logits(model, ids);
  for (size_t i = 0; i < steps.size(); ++i) {
    const float* row = full.data() + static_cast<int64_t>(kPrompt - 1 + i) * V;
    EXPECT_EQ(argmax(row, V), ids[kPrompt + i]) << "token " << i;
    // The state is the chunked sum in another order: fp32 rounding over 200 tokens.
    EXPECT_LE(relative_error(Tensor::of(steps[i].data(), {V}), Tensor::of(row, {V})), 2e-4) << "token " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Variant, ::testing::ValuesIn(variants()), [](const auto& p) { return p.param; });

TEST(Decoder, PromptInPiecesEqualsPromptAtOnceAndResetForgets) {
  const std::string dir = std::string(KESTREL_FIXTURES) + "/model_k3";
  Model model(parse_model_config(read_text(dir + "/config.json"), dir));
  model.parameters().allocate(Device::cpu, DType::f32, false);
  load_weights(model.parameters(), WeightSource(dir));
  std::vector<int32_t> ids(300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((i * i + 5) % 131);
  Decoder decoder(model, 300);
  const auto whole = decoder.feed(ids);
  const std::vector<float> at_once(whole.begin(), whole.end());
  decoder.reset();
  std::span<const float> last;
  const std::span<const int32_t> all(ids);
  size_t at = 0;
  for (size_t n : {1, 2, 60, 64, 130, 43}) {
    last = decoder.feed(all.subspan(at, n));
    at += n;
  }
  EXPECT_EQ(decoder.length(), 300);
  EXPECT_LE(relative_error(Tensor::of(last.data(), {131}), Tensor::of(at_once.data(), {131})),
            2e-4);  // fp32, other chunking
  const int32_t one = 1;
  EXPECT_THROW(decoder.feed(std::span(&one, 1)), DataError);  // full
  decoder.reset();
  const int32_t beyond = 131;
  EXPECT_THROW(decoder.feed(std::span(&beyond, 1)), DataError);
}

TEST(Sampling, GreedyTopKTopPAndSeed) {
  const std::vector<float> logits{1.f, 3.f, 2.f, 3.f, -1.f};
  EXPECT_EQ(choose_token(logits, {.temperature = 0}, 0), 1);  // the lowest id among equals
  int counts[5] = {};
  for (int64_t i = 0; i < 4000; ++i)
    ++counts[choose_token(logits, {.temperature = 1, .top_k = 0, .top_p = 1, .seed = 7}, i)];
  double sum = 0;
  for (float x : logits) sum += std::exp(x);
  for (size_t i = 0; i < 5; ++i) {  // within five standard deviations of a binomial of 4000 draws
    const double p = std::exp(logits[i]) / sum;
    EXPECT_NEAR(counts[i] / 4000.0, p, 5 * std::sqrt(p * (1 - p) / 4000)) << i;
  }
  for (int64_t i = 0; i < 200; ++i) {
    const int32_t k2 = choose_token(logits, {.temperature = 1, .top_k = 2, .top_p = 1, .seed = 1}, i);
    EXPECT_TRUE(k2 == 1 || k2 == 3);
    EXPECT_EQ(choose_token(logits, {.temperature = 1, .top_k = 0, .top_p = 0.1, .seed = 1}, i), 1);
    EXPECT_EQ(k2, choose_token(logits, {.temperature = 1, .top_k = 2, .top_p = 1, .seed = 1}, i));
  }
  EXPECT_THROW(check_sampling({.temperature = -1}), ConfigError);
  EXPECT_THROW(check_sampling({.top_k = -1}), ConfigError);
  EXPECT_THROW(check_sampling({.top_p = 0}), ConfigError);
}
