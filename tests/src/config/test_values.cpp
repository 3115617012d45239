// What a good run file becomes: values, defaults, inheritance, overrides, the resolved text.
#include <filesystem>
#include <fstream>
#include <random>

#include "config_support.h"
#include "src/config/fields.h"

namespace kestrel::test {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<int64_t>;

class Folder {
 public:
  Folder() {
    path_ = fs::path(::testing::TempDir()) /
            ("kestrel_config_" + std::to_string(std::random_device{}()) + std::to_string(std::random_device{}()));
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string write(const std::string& name, const std::string& content) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << content;
    return (path_ / name).string();
  }

 private:
  fs::path path_;
};

TEST(Config, ValuesAndDefaults) {
  const RunConfig c = small();
  EXPECT_EQ(c.model.hidden_size, 16);
  EXPECT_EQ(c.model.full_attn_layers, (Ints{4, 6}));
  EXPECT_EQ(c.model.kda_layers(), (Ints{1, 2, 3, 5}));
  EXPECT_EQ(c.model.linear_attn.gate_lower_bound, -5.0);
  EXPECT_EQ(c.model.residual, ModelConfig::Residual::block_attnres);
  EXPECT_EQ(c.model.q_lora_rank, std::nullopt);
  EXPECT_EQ(c.model.mla_norm_eps, 1e-6);
  EXPECT_EQ(c.model.balancing.method, BalancingConfig::Method::quantile);
  EXPECT_EQ(c.model.balancing.ema, 0.0);
  EXPECT_EQ(c.model.expert_input_size(), 16);
  EXPECT_EQ(c.optimizer.grad_clip, 1.0);
  EXPECT_EQ(c.optimizer.qk_clip, std::nullopt);
  EXPECT_EQ(c.train.device, TrainConfig::DeviceChoice::automatic);
  EXPECT_EQ(c.checkpoint.resume, CheckpointConfig::Resume::automatic);
  EXPECT_EQ(c.log.dir, "runs/small");
  EXPECT_EQ(c.checkpoint.dir, "runs/small/checkpoints");
  EXPECT_EQ(c.total_steps(), 100);
}

TEST(Config, LayerKinds) {
  const ModelConfig m = small({"model.first_k_dense_replace=1", "model.moe_layer_freq=2"}).model;
  const auto layers_where = [](auto kind) {
    Ints out;
    for (int64_t l = 0; l < 6; ++l) {
      if (kind(l)) out.push_back(l);
    }
    return out;
  };
  EXPECT_EQ(layers_where([&](int64_t l) { return m.is_full_attention(l); }), (Ints{3, 5}));
  EXPECT_EQ(layers_where([&](int64_t l) { return m.is_moe(l); }), (Ints{2, 4}));
  EXPECT_EQ(m.num_moe_layers(), 2);
  EXPECT_EQ(m.num_dense_layers(), 4);
  EXPECT_EQ(m.num_kda_layers(), 4);
}

TEST(Config, LayerListsInEachForm) {
  const std::string key = "model.linear_attn_config.";
  const auto layers = [&](const std::vector<std::string>& overrides) {
    return small(overrides).model.full_attn_layers;
  };
  EXPECT_EQ(layers({key + "full_attn_every=3"}), (Ints{3, 6}));
  EXPECT_EQ(layers({key + "full_attn_every=1"}), (Ints{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(layers({key + "full_attn_every=7"}), (Ints{6}));
  EXPECT_EQ(layers({key + "full_attn_every=null", key + "full_attn_layers=[2]"}), (Ints{2}));
  EXPECT_EQ(layers({key + "full_attn_every=null", key + "kda_layers=[2,3]"}), (Ints{1, 4, 5, 6}));
  EXPECT_EQ(layers({key + "full_attn_every=null", key + "full_attn_layers=[]"}), Ints{});
  EXPECT_EQ(layers({key + "full_attn_layers=[4,6]", key + "kda_layers=[1,2,3,5]"}), (Ints{4, 6}));  // all agree
}

TEST(Config, UnneededSizesMayBeLeftOut) {
  const std::string text = R"({"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "intermediate_size": 8,
      "linear_attn_config": {"full_attn_layers": [], "num_heads": 1, "head_dim": 4}})";
  const ModelConfig m = parse_model_config(text, "model.json");
  EXPECT_EQ(m.num_kda_layers(), 2);
  EXPECT_EQ(m.num_attention_heads, 0);
  EXPECT_EQ(parse_model_config(to_json(m), "again.json"), m);
}

TEST(Config, DynamicQuantileHasAnAverageOfItsOwn) {
  EXPECT_EQ(small({"model.balancing.method=quantile_dynamic"}).model.balancing.ema, 0.9);
  EXPECT_EQ(small({"model.balancing.method=quantile_dynamic", "model.balancing.ema=0"}).model.balancing.ema, 0.0);
}

TEST(Config, LengthInTokens) {
  // 8 rows of 32 tokens are 256 tokens a step; the last step is a full one.
  EXPECT_EQ(small({"train.steps=null", "train.tokens=25600"}).total_steps(), 100);
  EXPECT_EQ(small({"train.steps=null", "train.tokens=25601"}).total_steps(), 101);
  EXPECT_EQ(small({"train.steps=null", "train.tokens=1e6"}).total_steps(), 3907);
  EXPECT_EQ(small({"train.steps=null", "train.tokens=9e15"}).train.tokens, int64_t{9000000000000000});
}

TEST(Config, NumbersAreReadExactly) {
  const RunConfig c = small({"train.seed=9007199254740993", "schedule.peak_lr=0.1", "optimizer.eps=1E-8"});
  EXPECT_EQ(c.train.seed, int64_t{9007199254740993});  // no double holds it
  EXPECT_EQ(c.schedule.peak_lr, 0.1);
  EXPECT_EQ(c.optimizer.eps, 1e-8);
}

TEST(Config, CommentsEscapesAndByteOrderMark) {
  const std::string text = "\xef\xbb\xbf// first line\n" + replaced(kSmall, "\"data\": {",
                                                                    "/* two\n lines */ \"data\": { // \"key\": 1\n"
                                                                    "\"train\": [\"a//b.bin\", \"\\u00e9\\\\\"],");
  const RunConfig c = parse_run_config(text, "small.json");
  EXPECT_EQ(c.data.train, (std::vector<std::string>{"a//b.bin", "\xc3\xa9\\"}));
}

TEST(Config, OverridesAreJsonElseText) {
  const RunConfig c = small({"train.steps=200", "model.residual=standard", "optimizer.grad_clip=null",
                             "data.train=[\"a.bin\",\"b.bin\"]", "log.dir=runs/x=1", "train.steps=300",
                             "model.balancing={\"method\":\"sign\",\"sign_rate\":0.01}", "log.tensorboard=true"});
  EXPECT_EQ(c.train.steps, 300);  // the last one wins
  EXPECT_EQ(c.model.residual, ModelConfig::Residual::standard);
  EXPECT_EQ(c.optimizer.grad_clip, std::nullopt);
  EXPECT_EQ(c.data.train, (std::vector<std::string>{"a.bin", "b.bin"}));
  EXPECT_EQ(c.log.dir, "runs/x=1");
  EXPECT_EQ(c.checkpoint.dir, "runs/x=1/checkpoints");
  EXPECT_EQ(c.model.balancing.sign_rate, 0.01);
  EXPECT_TRUE(c.log.tensorboard);
}

TEST(Config, BaseChain) {
  const Folder folder;
  folder.write("root.json",
               replaced(kSmall, "\"sequence_length\": 32", "\"train\": [\"a\", \"b\"], \"sequence_length\": 32"));
  folder.write("sub/middle.json",
               R"({ "base": "../root.json", "model": { "residual": "standard", "vocab_size": 65 } })");
  const std::string top = folder.write("top.json", R"({
    "model": { "vocab_size": 66, "balancing": { "gain": 0.5 } },
    "data": { "train": ["c"] },  // a list replaces
    "base": "sub/middle.json"
  })");
  const RunConfig c = load_run_config(top, {"train.steps=7", "schedule.warmup_steps=1"});
  EXPECT_EQ(c.model.vocab_size, 66);
  EXPECT_EQ(c.model.residual, ModelConfig::Residual::standard);
  EXPECT_EQ(c.model.hidden_size, 16);
  EXPECT_EQ(c.model.balancing.gain, 0.5);
  EXPECT_EQ(c.data.train, std::vector<std::string>{"c"});
  EXPECT_EQ(c.data.sequence_length, 32);
  EXPECT_EQ(c.train.steps, 7);
  EXPECT_EQ(c.log.dir, "runs/top");  // of the file that is run, so that runs do not share a directory
}

TEST(Config, ErrorsInABaseNameThatFile) {
  const Folder folder;
  folder.write("root.json", replaced(kSmall, "\"hidden_size\": 16", "\"hidden_size\": 0"));
  const std::string top = folder.write("top.json", R"({ "base": "root.json" })");
  expect_parts(message_of([&] { load_run_config(top); }), {"root.json:4: model.hidden_size is 0"});
}

TEST(Config, BadBases) {
  const Folder folder;
  const std::string a = folder.write("a.json", "{\n \"base\": \"b.json\" }");
  folder.write("b.json", "{ \"base\": \"a.json\" }");
  expect_parts(message_of([&] { load_run_config(a); }), {"b.json:1", "circle", "a.json -> b.json -> a.json", "Remove"});
  const std::string self = folder.write("self.json", "{ \"base\": \"./self.json\" }");
  expect_parts(message_of([&] { load_run_config(self); }), {"self.json:1", "circle"});
  const std::string lost = folder.write("lost.json", "{\n\n \"base\": \"nowhere.json\" }");
  expect_parts(message_of([&] { load_run_config(lost); }),
               {"lost.json:3: base cannot read", "nowhere.json", "No such"});
  const std::string list = folder.write("list.json", "{ \"base\": [\"a.json\"] }");
  expect_parts(message_of([&] { load_run_config(list); }),
               {"list.json:1: base", "(a list)", "path of another run file"});
  expect_parts(message_of([&] { load_run_config(fs::path(a).parent_path().string()); }), {"cannot read", "directory"});
  expect_parts(message_of([&] { load_run_config("nowhere.json"); }), {"cannot read nowhere.json", "No such file"});
}

TEST(Config, ResolvedTextRoundTrips) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"train.steps=null", "train.tokens=123456789"},
      {"model.linear_attn_config.gate_lower_bound=null", "optimizer.grad_clip=null", "optimizer.qk_clip=100"},
      {"model.residual=full_attnres", "model.hidden_act=silu", "model.balancing.method=quantile_dynamic"},
      {"model.linear_attn_config.full_attn_every=1", "data.train=[\"x\"]", "data.validation=[\"y\"]", "eval.every=5",
       "data.tokenizer=t.json", "train.init_from=dir", "schedule.kind=wsd", "schedule.decay_steps=3",
       "train.recompute=block", "checkpoint.resume=must", "log.dir=elsewhere", "schedule.peak_lr=0.1234567890123"},
  };
  for (const auto& overrides : cases) {
    const RunConfig c = small(overrides);
    const RunConfig again = parse_run_config(to_json(c), "other_name.json");
    EXPECT_EQ(again, c) << to_json(c);
    EXPECT_EQ(to_json(again), to_json(c));
    EXPECT_EQ(parse_model_config(to_json(c.model), "model.json"), c.model);
  }
}

// A default kept both in the table's text and in the struct could drift; an effective field left out of to_json would
// not survive the round trip.
TEST(Config, TableAndTextAgree) {
  const nlohmann::json tree = nlohmann::json::parse(to_json(small()));
  for (const Field& f : fields()) {
    std::string pointer = "/" + f.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    EXPECT_EQ(tree.contains(nlohmann::json::json_pointer(pointer)), f.printed) << f.path;
    EXPECT_NE(find_section(f.section()), nullptr) << f.path;
    EXPECT_FALSE(f.meaning.empty()) << f.path;
    EXPECT_EQ(std::count_if(fields().begin(), fields().end(), [&](const Field& o) { return o.path == f.path; }), 1)
        << f.path;
  }
}

TEST(Config, HashFollowsTheValuesAlone) {
  const std::string h = config_hash(small());
  EXPECT_EQ(h.size(), 16u);
  EXPECT_EQ(config_hash(parse_run_config(replaced(kSmall, "\"steps\": 100", "/* n */ \"steps\" : 1e2"), "small.json")),
            h);
  EXPECT_NE(config_hash(small({"train.seed=1"})), h);
  EXPECT_EQ(config_hash(small({"train.seed=1"}).model), config_hash(small().model));
  EXPECT_NE(config_hash(small({"model.rms_norm_eps=1e-6"}).model), config_hash(small().model));
  EXPECT_EQ(small().model.rms_norm_eps, 1e-5);
}

}  // namespace
}  // namespace kestrel::test
