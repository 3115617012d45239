// What a bad run file is answered: the path, the line, the value, the limit and the way out.
#include "config_support.h"
#include "src/config/fields.h"

namespace kestrel::test {
namespace {

// kSmall with `from` replaced by `to`.
std::string refusal_with(const std::string& from, const std::string& to) {
  return refusal(replaced(kSmall, from, to));
}

TEST(ConfigErrors, UnknownKeys) {
  expect_parts(
      refusal_with("\"hidden_size\"", "\"hidden_sise\""),
      {"small.json:4: model.hidden_sise is not a field", "Did you mean model.hidden_size?", "--explain model"});
  expect_parts(refusal_with("\"hidden_size\"", "\"zzzzzzzz\""),
               {"model.zzzzzzzz is not a field", "model has: vocab_size, "});
  expect_parts(refusal_with("\"head_dim\"", "\"heads_dim\""),
               {"small.json:6: model.linear_attn_config.heads_dim", "Did you mean model.linear_attn_config.head_dim?"});
  expect_parts(refusal_with("\"data\": {", "\"steps\": 3, \"data\": {"),
               {"small.json:17: steps is not a field", "Did you mean train.steps?", "The top level has: model, data"});
  expect_parts(refusal_with("\"schedule\"", "\"shedule\""), {"shedule", "Did you mean schedule?"});
  expect_parts(refusal_with("\"peak_lr\"", "\"zzzzzzzz\""), {"schedule.zzzzzzzz is not a field", "schedule has: kind"});
  EXPECT_EQ(refusal_with("\"peak_lr\"", "\"zzzzzzzz\"").find("Did you mean"), std::string::npos);
  expect_parts(refusal_of_overrides({"train.stepz=3"}), {"command line (train.stepz=3): train.stepz", "train.steps?"});
}

TEST(ConfigErrors, DuplicateKeys) {
  expect_parts(refusal_with("\"vocab_size\": 64,", "\"vocab_size\": 64,\n\"vocab_size\": 65,"),
               {"small.json:4: model.vocab_size", "twice", "first in line 3", "keep one"});
  expect_parts(refusal_with("\"head_dim\": 8", "\"head_dim\": 8, \"head_dim\": 8"),
               {"small.json:6: model.linear_attn_config.head_dim", "twice"});
  expect_parts(refusal_with("\"data\"", "\"model\": {}, \"data\""), {"small.json:17: model", "twice"});
}

TEST(ConfigErrors, WrongTypes) {
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": \"16\""),
               {"small.json:4: model.hidden_size is \"16\" (a string)", "expected: whole number"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": 16.5"), {"is 16.5", "whole number"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": true"), {"is true (a boolean)", "whole number"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": null"), {"model.hidden_size is null", "whole"});
  expect_parts(refusal_of_overrides({"train.steps={\"a\":1}"}), {"train.steps is {\"a\":1} (an object)"});
  expect_parts(refusal_of_overrides({"train.steps.now=1"}), {"train.steps is {\"now\":1} (an object)"});
  expect_parts(refusal_of_overrides({"log.tensorboard=1"}), {"log.tensorboard is 1 (a number)", "true or false"});
  expect_parts(refusal_of_overrides({"log.dir=3"}), {"log.dir is 3 (a number)", "string"});
  expect_parts(refusal_of_overrides({"log.dir="}), {"log.dir is \"\" (empty)", "string"});
  expect_parts(refusal_of_overrides({"data.train=a.bin"}), {"data.train is \"a.bin\" (a string)", "list of strings"});
  expect_parts(refusal_of_overrides({"data.train=[\"a\", 3]"}), {"data.train", "[1] is 3", "list of strings"});
  expect_parts(refusal_of_overrides({"model.linear_attn_config.full_attn_layers=[4, 6.5]"}), {"[1] is 6.5"});
  expect_parts(refusal_of_overrides({"model.residual=sum"}),
               {"model.residual is \"sum\"", "\"block_attnres\", \"full_attnres\" or \"standard\""});
  expect_parts(refusal_of_overrides({"model.balancing=sign"}), {"model.balancing is \"sign\" (a string)", "an object"});
  expect_parts(refusal("[1]"), {"small.json:1: the run file is [1] (a list)", "an object"});
}

TEST(ConfigErrors, OutOfRange) {
  expect_parts(refusal_of_overrides({"train.steps=0"}), {"train.steps is 0", "[1, 2^31 - 1]"});
  expect_parts(refusal_of_overrides({"train.seed=-1"}), {"train.seed is -1", "[0, 2^63 - 1]"});
  expect_parts(refusal_of_overrides({"train.seed=18446744073709551615"}),
               {"train.seed is 18446744073709551615", "[0, 2^63 - 1]"});
  expect_parts(refusal_of_overrides({"train.seed=1e17"}), {"train.seed is 1e+17", "all its digits"});
  EXPECT_EQ(small({"train.seed=9223372036854775807"}).train.seed, INT64_MAX);
  expect_parts(refusal_of_overrides({"train.steps=1e300"}), {"train.steps is 1e+300", "whole number in [1, 2^31 - 1]"});
  expect_parts(refusal_of_overrides({"model.hidden_size=4294967296"}), {"is 4294967296", "[1, 1048576]"});
  expect_parts(refusal_of_overrides({"optimizer.momentum=1"}), {"optimizer.momentum is 1", "[0, 1)"});
  expect_parts(refusal_of_overrides({"optimizer.grad_clip=0"}), {"is 0", "above 0", "null (no clipping)"});
  expect_parts(refusal_of_overrides({"data.sequence_length=0"}), {"data.sequence_length is 0", "[1, "});
  expect_parts(refusal_of_overrides({"model.linear_attn_config.short_conv_kernel_size=9"}),
               {"is 9", "[1, 8]", "8 taps"});
  expect_parts(refusal_of_overrides({"model.linear_attn_config.head_dim=4096"}), {"is 4096", "more heads"});
  for (const char* gain : {"0", "1.5", "-1"}) {
    expect_parts(refusal_of_overrides({std::string("model.balancing.gain=") + gain}),
                 {std::string("model.balancing.gain is ") + gain, "(0, 1]", "overshoots"});
  }
  for (const char* bound : {"-6", "0", "5"}) {
    expect_parts(refusal_of_overrides({std::string("model.linear_attn_config.gate_lower_bound=") + bound}),
                 {std::string("gate_lower_bound is ") + bound, "[-5.9, 0)", "use null"});
  }
  EXPECT_EQ(small({"model.linear_attn_config.gate_lower_bound=-5.9"}).model.linear_attn.gate_lower_bound, -5.9);
}

// Every integer field has an end, so that no count made of them leaves 64 bits.
TEST(ConfigErrors, EveryWholeNumberHasAnUpperLimit) {
  for (const Field& f : fields()) {
    const bool whole = f.kind == Field::Kind::integer || f.kind == Field::Kind::integers;
    if (whole && f.role == Field::Role::effective) {
      EXPECT_LE(f.max, Field::kMaxWhole) << f.path;
    }
  }
}

TEST(ConfigErrors, TokensOfAStep) {
  expect_parts(refusal_of_overrides({"train.global_batch_size=2147483646"}),
               {"train.global_batch_size is 2147483646", "tokens in a step", "the limit is 2147483647", "Lower"});
  const std::string rows = "data.sequence_length=1000000000", two = "train.global_batch_size=2";
  expect_parts(
      refusal_of_overrides({rows, two, "train.micro_batch_size=2"}),
      {"train.micro_batch_size is 2", "2000000000 tokens in a micro-batch, 2 rows", "the limit is 1073741823"});
  EXPECT_EQ(small({rows, two, "train.micro_batch_size=1"}).tokens_per_step(), 2000000000);
}

TEST(ConfigErrors, StringsThatAreNoText) {
  expect_parts(refusal_of_overrides({"log.dir=runs/\xff"}), {"command line (log.dir=", "not UTF-8"});
  expect_parts(refusal_of_overrides({"log.dir=\"a\\u0000b\""}), {"\"a\\u0000b\"", "control character"});
  expect_parts(refusal_of_overrides({"log.dir=a\nb"}), {"\"a\\nb\"", "control character"});
  expect_parts(refusal_of_overrides({"data.train=[\"a\", \"b\\u007f\"]"}), {"data.train", "control character"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": \"\\u0001\""),
               {"small.json:4: model.hidden_size", "control character"});
  expect_parts(message_of([] { parse_run_config(kSmall, "a\xff.json"); }), {"name of the run file", "not UTF-8"});
  EXPECT_EQ(small({"data.train=[\"a\",\n\"b\"]"}).data.train.size(), 2u);  // between values lines may end
  EXPECT_EQ(small({"log.dir=runs/\xc3\xa9"}).log.dir, "runs/\xc3\xa9");
}

TEST(ConfigErrors, NotYetThere) {
  for (const char* name : {"context", "pipeline"}) {
    expect_parts(refusal_of_overrides({std::string("parallel.") + name + "=2"}),
                 {std::string("parallel.") + name + " is 2", "equal to 1", "does not exist yet", "set 1"});
  }
  expect_parts(refusal_of_overrides({"parallel.zero_stage=3"}), {"parallel.zero_stage is 3", "set 1"});
}

TEST(ConfigErrors, ExpertsThatCannotBeSharedOut) {
  expect_parts(refusal_of_overrides({"parallel.expert=3"}), {"parallel.expert is 3", "num_experts 4", "divisor"});
  expect_parts(refusal_of_overrides({"parallel.expert=0"}), {"parallel.expert is 0"});
  expect_parts(refusal_of_overrides({"parallel.expert=2", "model.num_experts=0"}),
               {"parallel.expert is 2", "Set it to 1"});
  EXPECT_EQ(small({"parallel.expert=2"}).parallel.expert, 2);
}

TEST(ConfigErrors, MissingFields) {
  expect_parts(refusal_with("\"hidden_size\": 16,", ""),
               {"small.json: model.hidden_size is missing", "section \"model\"", "\"hidden_size\": 1024"});
  expect_parts(refusal_with("\"peak_lr\": 1e-3,", ""), {"schedule.peak_lr is missing", "section \"schedule\""});
  expect_parts(refusal_with("\"steps\": 100,", ""), {"train.steps is missing", "train.tokens", "\"steps\": 1000"});
  expect_parts(refusal_with("\"full_attn_every\": 4,", ""), {"full_attn_layers is missing", "\"full_attn_every\": 4"});
  expect_parts(refusal_with("\"num_heads\": 2,", ""),
               {"linear_attn_config.num_heads is missing", "4 of the layers are KDA"});
  for (const char* line : {"\"num_attention_heads\": 2,", "\"kv_lora_rank\": 8,", "\"qk_nope_head_dim\": 4,",
                           "\"qk_rope_head_dim\": 2,", "\"v_head_dim\": 4,"}) {
    expect_parts(refusal_with(line, ""), {"is missing", "the MLA layers [4,6] need it", "at least 1"});
  }
  expect_parts(refusal_with("\"intermediate_size\": 32,", ""),
               {"model.intermediate_size is missing", "1 dense layers"});
  expect_parts(refusal_of_overrides({"model.moe_intermediate_size=0"}),
               {"moe_intermediate_size is 0", "5 layers of experts"});
}

TEST(ConfigErrors, LayerLists) {
  const std::string off = "model.linear_attn_config.full_attn_every=null";
  const std::string mla = "model.linear_attn_config.full_attn_layers=", kda = "model.linear_attn_config.kda_layers=";
  expect_parts(refusal_of_overrides({off, mla + "[4,7]"}),
               {"full_attn_layers names layer 7", "num_hidden_layers is 6", "1 to 6"});
  expect_parts(refusal_of_overrides({off, mla + "[0,4]"}), {"[0] is 0", "[1, "});
  expect_parts(refusal_of_overrides({off, mla + "[4,4]"}), {"4 after 4", "ascend", "once"});
  expect_parts(refusal_of_overrides({off, kda + "[3,1]"}), {"kda_layers has 1 after 3", "ascend"});
  expect_parts(refusal_of_overrides({off, mla + "[4,6]", kda + "[1,2,3]"}),
               {"layer 5 is in neither", "kda_layers to null"});
  expect_parts(refusal_of_overrides({off, mla + "[4,6]", kda + "[1,2,3,4,5]"}), {"layer 4 is in both", "1 to 6"});
  expect_parts(refusal_of_overrides({mla + "[4]"}), {"full_attn_every is 4", "[4,6]", "set full_attn_every to null"});
}

TEST(ConfigErrors, Experts) {
  expect_parts(refusal_of_overrides({"model.num_experts_per_token=4"}),
               {"model.num_experts_per_token is 4", "4 experts", "at most 3"});
  expect_parts(refusal_of_overrides({"model.num_experts_per_token=1"}),
               {"num_experts_per_token is 1", "moe_renormalize", "no gradient", "Set moe_renormalize to false"});
  EXPECT_EQ(small({"model.num_experts_per_token=1", "model.moe_renormalize=false"}).model.num_experts_per_token, 1);
  expect_parts(
      refusal_of_overrides({"model.first_k_dense_replace=6"}),
      {"model.num_experts is 4", "no layer has experts", "first_k_dense_replace is 6", "set num_experts to 0"});
  expect_parts(
      refusal_of_overrides({"model.balancing.method=quantile_dynamic", "model.balancing.estimator=micro_mean"}),
      {"model.balancing.estimator is \"micro_mean\"", "\"quantile_dynamic\" takes"});
}

TEST(ConfigErrors, PublishedFieldsWithOtherValues) {
  expect_parts(refusal_of_overrides({"model.num_key_value_heads=1"}),
               {"model.num_key_value_heads is 1", "num_attention_heads is 2", "Set them equal"});
  expect_parts(refusal_of_overrides({"model.model_type=llama"}), {"is \"llama\"", "only value", "\"kimi_linear\""});
  expect_parts(refusal_of_overrides({"model.mla_use_nope=false"}), {"is false", "only value", "true", "Rotary"});
  expect_parts(refusal_of_overrides({"model.moe_router_activation_func=softmax"}), {"is \"softmax\"", "\"sigmoid\""});
  expect_parts(refusal_of_overrides({"model.num_expert_group=8"}), {"is 8", "only value", "1 or null"});
  expect_parts(refusal_of_overrides({"model.num_nextn_predict_layers=1"}), {"is 1", "does not exist yet", "set 0"});
  expect_parts(refusal_of_overrides({"model.attention_dropout=0.1"}), {"is 0.1", "set 0"});
  EXPECT_EQ(small({"model.attention_dropout=0.0", "model.top_k=50", "model.quantization_config={\"bits\":4}"}),
            small());
}

TEST(ConfigErrors, RunFields) {
  expect_parts(refusal_of_overrides({"train.tokens=1000"}),
               {"train.tokens is 1000", "train.steps is 100", "set it to null"});
  expect_parts(refusal_of_overrides({"train.micro_batch_size=3"}),
               {"train.micro_batch_size is 3", "global_batch_size = 8", "a global batch of 9"});
  expect_parts(refusal_of_overrides({"train.steps=10"}), {"schedule.warmup_steps is 10", "10 steps", "at most 9"});
  expect_parts(refusal_of_overrides({"schedule.min_lr=0.1"}), {"schedule.min_lr is 0.1", "peak_lr = 0.001", "Lower"});
  expect_parts(refusal_of_overrides({"schedule.kind=wsd"}), {"schedule.decay_steps is missing", "1 to 89"});
  expect_parts(refusal_of_overrides({"schedule.kind=wsd", "schedule.decay_steps=90"}),
               {"decay_steps is 90", "1 to 89"});
  EXPECT_EQ(small({"schedule.kind=wsd", "schedule.decay_steps=89"}).schedule.decay_steps, 89);
  EXPECT_EQ(small({"train.steps=1", "schedule.warmup_steps=0"}).total_steps(), 1);
  expect_parts(refusal_of_overrides({"eval.every=5"}), {"eval.every is 5", "data.validation", "set eval.every to 0"});
  expect_parts(refusal_of_overrides({"optimizer.qk_clip=100", "model.linear_attn_config.full_attn_every=null",
                                     "model.linear_attn_config.full_attn_layers=[]"}),
               {"optimizer.qk_clip is 100", "no MLA layer", "null"});
}

TEST(ConfigErrors, BadOverrides) {
  expect_parts(refusal_of_overrides({"train.steps"}), {"\"train.steps\" is not an override", "train.steps=200"});
  expect_parts(refusal_of_overrides({"=3"}), {"\"=3\" is not an override"});
  expect_parts(refusal_of_overrides({".steps=3"}), {"not an override"});
  expect_parts(refusal_of_overrides({"train..steps=3"}), {"train. is not a field"});
  expect_parts(refusal_of_overrides({"base=x.json"}), {"base can only be set in a run file"});
  expect_parts(refusal_of_overrides({"data.train=[\"a\""}), {"command line (data.train=[\"a\")", "not closed"});
}

TEST(ConfigErrors, Syntax) {
  expect_parts(refusal_with("\"hidden_size\": 16,", "\"hidden_size\": 16"),
               {"small.json:5:", "'\"'", "a comma may be missing"});
  expect_parts(refusal_with("\"warmup_steps\": 10 }", "\"warmup_steps\": 10, }"),
               {"small.json:19", "comma before the closing }"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": sixteen"),
               {"small.json:4: model.hidden_size: sixteen is not a JSON value", "\"quotes\""});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": 1e999"), {"1e999 is not a JSON value", "range"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": NaN"), {"NaN is not a JSON value"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\" 16"), {"small.json:4", "where the ':'"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size: 16"), {"small.json:4", "no closing quote"});
  expect_parts(refusal_with("\"hidden_size\": 16", "hidden_size: 16"), {"small.json:4", "'h'", "double quotes"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": \"\\x\""), {"small.json:4", "escape"});
  expect_parts(refusal_with("\"hidden_size\": 16", "\"hidden_size\": \"\xff\""), {"small.json:4", "UTF-8"});
  expect_parts(refusal_with("\"hidden_size\": 16", "/* \"hidden_size\": 16"), {"small.json:4", "comment has no end"});
  expect_parts(refusal(kSmall + "{}"), {"small.json:21", "after the end"});
  expect_parts(refusal(kSmall.substr(0, kSmall.size() - 3)), {"small.json:1", "not closed", "}"});
  expect_parts(refusal(""), {"small.json:1", "ends where a value is expected"});
  expect_parts(refusal("{\"a\":"), {"small.json:1", "ends where a value"});
  expect_parts(refusal("{\"a\\"), {"small.json:1", "no closing quote"});
  expect_parts(refusal(std::string(100000, '[')), {"deeper than 64"});
}

TEST(ConfigErrors, ModelSectionAlone) {
  const auto refuse = [](const std::string& text) {
    return message_of([&] { parse_model_config(text, "config.json"); });
  };
  expect_parts(refuse("{\n\"hidden_sise\": 3}"),
               {"config.json:2: hidden_sise is not a field", "Did you mean hidden_size?"});
  expect_parts(refuse("{\"vocab_size\": 3}"), {"config.json: hidden_size is missing", "Add it to the file"});
  expect_parts(refuse("{\"text_config\": {}}"), {"text_config", "whole published config.json"});
  expect_parts(refuse("3"), {"config.json:1: the model section is 3"});
}

}  // namespace
}  // namespace kestrel::test
