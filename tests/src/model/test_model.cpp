// The whole model against the golden fixtures: loss, logits, every gradient, loads; and against itself: recomputation
// and thread counts change no bit.
#include <filesystem>
#include <fstream>
#include <omp.h>
#include <sstream>

#include "kernels/gemm/gemm.h"
#include "src/config/run_config.h"
#include "src/model/evaluation.h"
#include "src/model/model.h"
#include "src/model/weights.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

std::vector<std::string> model_fixtures() {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(KESTREL_FIXTURES)) {
    const std::string n = e.path().filename();
    if (e.is_directory() && n.starts_with("model_")) names.push_back(n);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string read_text(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::string folder(const std::string& name) {
  return std::string(KESTREL_FIXTURES) + "/" + name;
}

class Golden : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(Golden, LossLogitsAndEveryGradient) {
  const std::string dir = folder(GetParam());
  const SafetensorsFile want(dir + "/expected.safetensors");
  Evaluation e(parse_model_config(read_text(dir + "/config.json"), dir), {Device::cpu, DType::f32, Recompute::none});
  load_weights(e.model().parameters(), WeightSource(dir));
  const Evaluation::Result got = e.run(want, /*gradients=*/true);

  // Double-precision goldens against fp32: 1e-6 is ten times what plain fp32 PyTorch reaches, 3e-5 five times, 3e-4
  // three times.
  const double loss = *want.tensor("loss").as<double>();
  EXPECT_LE(std::fabs(got.loss - loss) / loss, 1e-6) << got.loss << " " << loss;
  EXPECT_LE(relative_error(got.logits, want.tensor("logits")), 3e-5);
  int64_t gradients = 0;
  e.model().parameters().for_each([&](const NamedParameter& p) {
    if (!p.member->block->trained) return;
    ++gradients;
    EXPECT_LE(relative_error(p.rows_of(p.member->block->g), want.tensor("grad." + p.name)), 3e-4) << p.name;
  });
  int64_t expected = 0;
  for (const auto& [name, entry] : want.entries()) expected += name.starts_with("grad.");
  EXPECT_EQ(gradients, expected);
  for (size_t i = 0; i < e.model().moe_layers().size(); ++i) {
    const Tensor load = e.model().moe_layers()[i]->balancer().load();
    const Tensor golden = want.tensor("load." + e.model().moe_names()[i]);
    for (int64_t j = 0; j < load.numel(); ++j)
      EXPECT_EQ(load.i32()[j], golden.i32()[j]) << e.model().moe_names()[i] << " expert " << j;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Golden, ::testing::ValuesIn(model_fixtures()),
                         [](const auto& p) { return p.param; });

TEST(ModelFixtures, AreAllHere) {
  EXPECT_EQ(model_fixtures().size(), 17u);
}

namespace {

// All gradients of one fixture under given options, as raw bits.
std::vector<float> gradients(const std::string& name, Recompute recompute) {
  const std::string dir = folder(name);
  const SafetensorsFile want(dir + "/expected.safetensors");
  Evaluation e(parse_model_config(read_text(dir + "/config.json"), dir), {Device::cpu, DType::f32, recompute});
  load_weights(e.model().parameters(), WeightSource(dir));
  e.run(want, true);
  const Tensor g = e.model().parameters().gradients();
  return {g.f32(), g.f32() + g.numel()};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

}  // namespace

TEST_P(Golden, RecomputationChangesNoBit) {
  const auto none = gradients(GetParam(), Recompute::none);
  EXPECT_TRUE(same_bits(none, gradients(GetParam(), Recompute::pointwise)));
  EXPECT_TRUE(same_bits(none, gradients(GetParam(), Recompute::block)));
}

TEST(Model, ThreadCountChangesNoBitWithTheOwnProduct) {
  const CpuGemm before = cpu_gemm();
  const int threads = omp_get_max_threads();
  set_cpu_gemm(CpuGemm::own);
  omp_set_num_threads(1);
  const auto one = gradients("model_k3_long", Recompute::none);
  omp_set_num_threads(2);
  const auto two = gradients("model_k3_long", Recompute::none);
  omp_set_num_threads(3);
  const auto three = gradients("model_k3_long", Recompute::none);
  omp_set_num_threads(threads);
  set_cpu_gemm(before);
  EXPECT_TRUE(same_bits(one, two));
  EXPECT_TRUE(same_bits(one, three));
}
