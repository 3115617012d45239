// Decoding on the GPU against the CPU, for every model fixture.
#include <algorithm>
#include <filesystem>

#include "gpu/support.h"
#include "src/checkpoint/files.h"
#include "src/config/run_config.h"
#include "src/infer/decoder.h"
#include "src/model/weights.h"

namespace kestrel::test {
namespace {

// Logits after a prompt of 70 tokens (more than a chunk of KDA) and after each of 20 further ones.
std::vector<std::vector<float>> logits_of(const std::string& dir, Device device, DType dtype) {
  Model model(parse_model_config(read_file(dir + "/config.json"), dir));
  model.parameters().allocate(device, dtype, false);
  load_weights(model.parameters(), WeightSource(dir));
  const int32_t V = static_cast<int32_t>(model.config().vocab_size);
  std::vector<int32_t> ids(90);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((17 * i + 3) % static_cast<size_t>(V));
  Decoder decoder(model, 90);
  std::vector<std::vector<float>> out;
  for (size_t at = 0; at < ids.size();) {
    const size_t n = at == 0 ? 70 : 1;
    const auto logits = decoder.feed(std::span(ids).subspan(at, n));
    out.emplace_back(logits.begin(), logits.end());
    at += n;
  }
  return out;
}

TEST(GpuDecoder, EqualsTheCpu) {
  use_device(0);
  int variants = 0;
  for (const auto& e : std::filesystem::directory_iterator(KESTREL_FIXTURES)) {
    const std::string dir = e.path().string();
    if (!e.is_directory() || !e.path().filename().string().starts_with("model_")) continue;
    SCOPED_TRACE(dir);
    ++variants;
    const auto want = logits_of(dir, Device::cpu, DType::f32), got = logits_of(dir, Device::cuda, DType::f32);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const int64_t V = static_cast<int64_t>(want[i].size());
      // As the fp32 path of training: sums in another order, through all layers and 90 tokens of state.
      EXPECT_LE(relative_error(Tensor::of(got[i].data(), {V}), Tensor::of(want[i].data(), {V})), 1e-3) << "call " << i;
    }
  }
  EXPECT_GE(variants, 15);
}

}  // namespace
}  // namespace kestrel::test
