// Every run file of configs/, every model section of the fixtures, and what is made from the table.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "config_support.h"
#include "src/config/describe.h"
#include "src/config/fields.h"

namespace kestrel::test {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::vector<fs::path> files_below(const fs::path& root, const std::string& name_end) {
  std::vector<fs::path> out;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    if (name.size() >= name_end.size() && name.substr(name.size() - name_end.size()) == name_end) {
      out.push_back(entry.path());
    }
  }
  return out;
}

const fs::path kConfigs = fs::path(KESTREL_SOURCE_DIR) / "configs";

TEST(ConfigFiles, AllResolveAndRoundTrip) {
  const std::vector<fs::path> files = files_below(kConfigs, ".json");
  EXPECT_GE(files.size(), 40u);
  for (const fs::path& file : files) {
    SCOPED_TRACE(file.string());
    const RunConfig c = load_run_config(file.string());
    EXPECT_EQ(parse_run_config(to_json(c), "again.json"), c);
    EXPECT_EQ(c.log.dir, "runs/" + file.stem().string());
  }
}

TEST(ConfigFiles, EveryAblationChangesTheQuickstartAndNoTwoAreEqual) {
  RunConfig quickstart = load_run_config((kConfigs / "quickstart.json").string(), {"log.dir=x"});
  std::set<std::string> seen = {config_hash(quickstart)};
  for (const fs::path& file : files_below(kConfigs / "ablations", ".json")) {
    const RunConfig c = load_run_config(file.string(), {"log.dir=x"});
    EXPECT_TRUE(seen.insert(config_hash(c)).second) << file << " is another one again";
    EXPECT_EQ(content_of(file).rfind("//", 0), 0u) << file << " does not say what it shows";
  }
}

TEST(ConfigFiles, BenchmarkAndPublishedSizes) {
  const RunConfig bench = load_run_config((kConfigs / "bench_2p8b.json").string());
  EXPECT_EQ(bench.tokens_per_step(), 524288);
  EXPECT_EQ(bench.model.full_attn_layers, (std::vector<int64_t>{4, 8, 12}));
  EXPECT_EQ(bench.model.shared_width(), 2048);
  EXPECT_TRUE(bench.optimizer.per_head);
  const ModelConfig k3 = load_run_config((kConfigs / "k3_2p8t.json").string()).model;
  EXPECT_EQ(k3.num_full_attention_layers(), 24);
  EXPECT_EQ(k3.num_kda_layers(), 69);
  EXPECT_EQ(k3.full_attn_layers.back(), 93);
  EXPECT_EQ(k3.num_moe_layers(), 92);
  EXPECT_EQ(k3.shared_width(), 6144);
}

TEST(ConfigFiles, FixturesParse) {
  const std::vector<fs::path> files = files_below(KESTREL_FIXTURES, "config.json");
  EXPECT_GE(files.size(), 19u);
  for (const fs::path& file : files) {
    SCOPED_TRACE(file.string());
    const ModelConfig m = parse_model_config(content_of(file), file.string());
    const auto published = nlohmann::json::parse(content_of(file));
    const auto& linear = published["linear_attn_config"];
    EXPECT_EQ(m.full_attn_layers, linear["full_attn_layers"].get<std::vector<int64_t>>());
    EXPECT_EQ(m.kda_layers(), linear["kda_layers"].get<std::vector<int64_t>>());
    EXPECT_EQ(m.linear_attn.gate_lower_bound.has_value(), !linear["gate_lower_bound"].is_null());
    EXPECT_EQ(m.q_lora_rank.value_or(0),
              published["q_lora_rank"].is_null() ? 0 : published["q_lora_rank"].get<int64_t>());
    EXPECT_EQ(to_string(m.residual), published.value("residual", "block_attnres"));
    EXPECT_EQ(to_string(m.hidden_act), published["hidden_act"].get<std::string>());
    // Every plain value of the file arrives.
    const auto resolved = nlohmann::json::parse(to_json(m));
    for (const auto& [key, value] : published.items()) {
      if (resolved.contains(key) && !value.is_object()) {
        EXPECT_EQ(resolved[key], value) << key;
      }
    }
    EXPECT_EQ(parse_model_config(to_json(m), "again.json"), m);
  }
}

TEST(ConfigText, SchemaNamesEveryField) {
  const auto schema = nlohmann::json::parse(config_schema());
  for (const Field& f : fields()) {
    const nlohmann::json* at = &schema;
    std::string path = f.path;
    for (size_t dot; (dot = path.find('.')) != std::string::npos; path = path.substr(dot + 1)) {
      at = &at->at("properties").at(path.substr(0, dot));
      EXPECT_EQ(at->at("additionalProperties"), false) << f.path;
    }
    EXPECT_EQ(at->at("properties").at(path).at("description"), f.meaning);
  }
  const auto& gate =
      schema["properties"]["model"]["properties"]["linear_attn_config"]["properties"]["gate_lower_bound"];
  EXPECT_EQ(gate["type"], nlohmann::json({"number", "null"}));
  EXPECT_EQ(gate["minimum"], -5.9);
  EXPECT_EQ(gate["exclusiveMaximum"], 0);
  EXPECT_EQ(gate["default"], -5.0);
  EXPECT_EQ(schema["properties"]["train"]["properties"]["device"]["enum"], nlohmann::json({"auto", "cuda", "cpu"}));
  EXPECT_EQ(schema["properties"]["model"]["properties"]["mla_use_nope"]["enum"], nlohmann::json::array({true}));
}

TEST(ConfigText, ReferenceNamesEveryField) {
  const std::string page = config_reference();
  for (const Field& f : fields()) EXPECT_NE(page.find("`" + f.leaf() + "`"), std::string::npos) << f.path;
  for (const Section& s : sections()) EXPECT_NE(page.find("## `" + s.path + "`"), std::string::npos) << s.path;
}

TEST(ConfigText, Explain) {
  const std::string gate = explain_field("gate_lower_bound");
  for (const char* part :
       {"model.linear_attn_config.gate_lower_bound", "[-5.9, 0)", "null (the unbounded gate", "-5.0"}) {
    EXPECT_NE(gate.find(part), std::string::npos) << part << "\n" << gate;
  }
  EXPECT_EQ(explain_field("model.linear_attn_config.gate_lower_bound"), gate);
  const std::string seeds = explain_field("seed");  // two fields end so
  EXPECT_NE(seeds.find("data.seed"), std::string::npos);
  EXPECT_NE(seeds.find("train.seed"), std::string::npos);
  const std::string section = explain_field("balancing");
  EXPECT_NE(section.find("model.balancing.sign_rate"), std::string::npos);
  EXPECT_NE(explain_field("top_k").find("not the number of experts"), std::string::npos);
  expect_parts(message_of([] { explain_field("gate_lower_bond"); }),
               {"gate_lower_bond", "Did you mean", "gate_lower_bound?"});
}

}  // namespace
}  // namespace kestrel::test
