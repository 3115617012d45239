#include "src/checkpoint/hf.h"

#include <nlohmann/json.hpp>

#include "tests/src/checkpoint/temp_dir.h"
#include "tests/support.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::slurp;
using test::spill;
using test::TempDir;

void expect_in(const std::string& part, const std::string& whole) {
  EXPECT_NE(whole.find(part), std::string::npos) << "\"" << part << "\" is not in: " << whole;
}

TEST(WeightSource, ReadsTheGoldenModel) {
  const WeightSource w(std::string(KESTREL_FIXTURES) + "/model_k3");
  EXPECT_TRUE(w.has("model.norm.weight"));
  EXPECT_TRUE(w.has("language_model.model.norm.weight"));
  EXPECT_FALSE(w.has("model.norm.bias"));
  EXPECT_EQ(w.tensor("model.norm.weight").rank, 1);
  EXPECT_TRUE(w.mxfp4().empty());
  expect_in("Did you mean \"model.norm.weight\"?", error_of<DataError>([&] { w.tensor("model.norm.wight"); }));
}

TEST(WeightSource, DropsThePrefixAndListsMxfp4) {
  TempDir dir;
  test::Buffer a({2}), packed({2, 16}, DType::u8), scale({2, 1}, DType::u8);
  a.normal(1);
  packed.zero();
  scale.zero();
  const std::string e = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight";
  const std::vector<NamedTensor> both{{"language_model.model.norm.weight", a, {}},
                                      {e + "_packed", packed, {}},
                                      {e + "_scale", scale, {}},
                                      {"vision_tower.x", a, {}}};
  write_safetensors(dir.path("model.safetensors"), both);
  const WeightSource w(dir.path());
  EXPECT_EQ(w.names().front(), "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed");
  EXPECT_TRUE(w.has("vision_tower.x"));
  EXPECT_EQ(w.tensor("model.norm.weight").f32()[1], a[1]);
  EXPECT_EQ(w.mxfp4(), (std::vector<std::string>{"model.layers.1.block_sparse_moe.experts.0.w1.weight"}));
  EXPECT_EQ(w.entry("model.layers.1.block_sparse_moe.experts.0.w1.weight_scale").shape, (std::vector<int64_t>{2, 1}));

  write_safetensors(dir.path("half.safetensors"), {both[1]});
  expect_in("MXFP4 weight needs both", error_of<DataError>([&] { WeightSource s(dir.path("half.safetensors")); }));
  write_safetensors(dir.path("half.safetensors"), {both[2]});
  expect_in("MXFP4 weight needs both", error_of<DataError>([&] { WeightSource s(dir.path("half.safetensors")); }));
  write_safetensors(dir.path("twice.safetensors"), {both[0], {"model.norm.weight", a, {}}});
  expect_in("the same tensor", error_of<DataError>([&] { WeightSource s(dir.path("twice.safetensors")); }));
}

TEST(WeightSource, RefusesBrokenDirectories) {
  TempDir dir;
  expect_in("neither model.safetensors nor", error_of<DataError>([&] { WeightSource w(dir.path()); }));
  expect_in("does not exist", error_of<DataError>([&] { WeightSource w(dir.path("none")); }));
  const std::string index = dir.path("model.safetensors.index.json");
  const auto refusal = [&](const std::string& content) {
    spill(index, content);
    return error_of<DataError>([&] { WeightSource w(dir.path()); });
  };
  expect_in("not JSON", refusal("{"));
  expect_in("no object \"weight_map\"", refusal("{}"));
  expect_in("no object \"weight_map\"", refusal("[]"));
  expect_in("no file name", refusal(R"({"weight_map":{"a":"../x.safetensors"}})"));
  expect_in("no file name", refusal(R"({"weight_map":{"a":3}})"));
  expect_in("key \"a\" twice", refusal(R"({"weight_map":{"a":"x","a":"y"}})"));
  expect_in("No such file", refusal(R"({"weight_map":{"a":"x.safetensors"}})"));
  test::Buffer a({2});
  a.zero();
  write_safetensors(dir.path("x.safetensors"), {{"b", a, {}}});
  expect_in("but it does not", refusal(R"({"weight_map":{"a":"x.safetensors"}})"));
}

TEST(HfModel, WritesOneFileOrShardsWithAnIndex) {
  TempDir dir;
  test::Buffer a({4, 3}), b({5}), c({1});
  a.normal(1);
  b.normal(2);
  c.normal(3);
  const std::vector<NamedTensor> tensors{{"a", a, {2, 2, 3}}, {"b", b, {}}, {"c", c, {}}};
  write_hf_model(dir.path("one"), tensors, "{\"x\": 1}\n", 1000, {{"generation_config.json", "{}"}});
  EXPECT_EQ(slurp(dir.path("one/config.json")), "{\"x\": 1}\n");
  EXPECT_EQ(slurp(dir.path("one/generation_config.json")), "{}");
  EXPECT_FALSE(fs::exists(dir.path("one/model.safetensors.index.json")));
  EXPECT_EQ(SafetensorsFile(dir.path("one/model.safetensors")).metadata().at("format"), "pt");

  write_hf_model(dir.path("many/"), tensors, "{}", 30);  // a is larger than a shard: a file of its own
  const auto index = nlohmann::json::parse(slurp(dir.path("many/model.safetensors.index.json")));
  EXPECT_EQ(index["metadata"]["total_size"], 72);
  EXPECT_EQ(index["weight_map"]["a"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"]["c"], "model-00002-of-00002.safetensors");
  for (const char* name : {"one", "many"}) {
    const WeightSource w(dir.path(name));
    EXPECT_EQ(w.names(), (std::vector<std::string>{"a", "b", "c"}));
    EXPECT_EQ(w.entry("a").shape, (std::vector<int64_t>{2, 2, 3}));
    EXPECT_EQ(std::memcmp(w.tensor("a").data, a->data, 48), 0);
    EXPECT_EQ(std::memcmp(w.tensor("b").data, b->data, 20), 0);
  }
}

TEST(HfModel, IsAllOrNothing) {
  TempDir dir;
  test::Buffer a({1000});
  a.normal(1);
  fs::create_directory(dir.path("used"));
  spill(dir.path("used/file"), "x");
  expect_in("nothing is overwritten", error_of<DataError>([&] { write_hf_model(dir.path("used"), {}, "{}"); }));
  {
    test::FullDisk disk(500);
    EXPECT_THROW(write_hf_model(dir.path("new"), {{"a", a, {}}}, "{}"), DataError);
  }
  EXPECT_THROW(write_hf_model(dir.path("used/file/x"), {{"a", a, {}}}, "{}"), DataError);
  size_t left = 0;
  for (const auto& e : fs::directory_iterator(dir.path())) left += e.exists();
  EXPECT_EQ(left, 1u);
}

}  // namespace
}  // namespace kestrel
