// Whole training runs against the float64 traces, and the table of who updates what.
#include <algorithm>

#include "src/train/schedule.h"
#include "src/train/trainer.h"
#include "tests/src/train/run_files.h"

using namespace kestrel;
using namespace kestrel::test;
using nlohmann::json;

namespace {

class GoldenRun : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(GoldenRun, TraceAndFinalWeights) {
  const TempDir dir;
  const json trace = golden_trace(GetParam())["trace"];
  Trainer trainer(parse(golden_run(GetParam(), dir / "run")));
  double last_bias_range = 0;
  for (size_t step = 0; step < trace["loss"].size(); ++step) {
    const auto range = [&] {  // one bin of the histogram, over the layers
      double widest = 0;
      for (MoeLayer* m : trainer.model().moe_layers()) {
        const Tensor b = m->balancer().bias();
        widest = std::max(widest, static_cast<double>(*std::max_element(b.f32(), b.f32() + b.numel()) -
                                                      *std::min_element(b.f32(), b.f32() + b.numel())) +
                                      2.0);
      }
      return widest / 1000;
    };
    last_bias_range = range();
    const auto r = trainer.train_step();
    // fp32 against float64 over six steps: the bounds leave an order of magnitude above what is seen (1e-6 in the
    // loss).
    EXPECT_NEAR(r.loss / trace["loss"][step].get<double>(), 1.0, 1e-5) << step;
    EXPECT_NEAR(r.lr, trace["lr"][step].get<double>(), 1e-12) << step;
    EXPECT_NEAR(r.grad_norm / trace["grad_norm"][step].get<double>(), 1.0, 1e-3) << step;
    EXPECT_EQ(r.max_violation, trace["max_violation"][step].get<double>()) << step;  // counts: exact
    EXPECT_FALSE(r.skipped);
  }
  const SafetensorsFile want(std::string(KESTREL_FIXTURES) + "/" + GetParam() + "/expected.safetensors");
  int64_t tensors = 0;
  trainer.model().parameters().for_each([&](const NamedParameter& p) {
    const Tensor got = p.rows_of(p.member->block->master), golden = want.tensor("final." + p.name);
    ++tensors;
    if (p.member->rule == Rule::balance) {
      // A margin at a bin's edge may fall on the other side in fp32, which moves a quantile by up to one bin.
      for (int64_t i = 0; i < got.numel(); ++i) EXPECT_NEAR(got.f32()[i], golden.f32()[i], last_bias_range) << p.name;
    } else {
      EXPECT_LE(relative_error(got, golden), 1e-3) << p.name;
    }
  });
  EXPECT_EQ(tensors, static_cast<int64_t>(want.entries().size()));
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GoldenRun, ::testing::Values("train_per_head_muon", "train_plain_muon"),
                         [](const auto& p) { return p.param; });

TEST(Optimizer, AssignsEveryTensorAsTheGoldenTable) {
  const json table = json::parse(read_text(std::string(KESTREL_FIXTURES) + "/optimizer_table.json"));
  const RunConfig run = parse(golden_run("train_per_head_muon", "unused"));
  const Model model(run.model);
  size_t seen = 0;
  model.parameters().for_each([&](const NamedParameter& p) {
    ASSERT_TRUE(table.contains(p.name)) << p.name;
    const json& want = table[p.name];
    const auto got = Optimizer::assignment(run.optimizer, *p.member);
    ++seen;
    if (want.is_null()) {
      EXPECT_EQ(got.kind, Optimizer::Assignment::Kind::none) << p.name;
    } else if (want["optimizer"] == "muon") {
      EXPECT_EQ(got.kind, Optimizer::Assignment::Kind::muon) << p.name;
      EXPECT_EQ(got.row_blocks, want["row_blocks"].get<std::vector<int64_t>>()) << p.name;
    } else {
      EXPECT_EQ(got.kind, Optimizer::Assignment::Kind::adamw) << p.name;
      EXPECT_EQ(got.weight_decay, want["weight_decay"].get<bool>()) << p.name;
    }
  });
  EXPECT_EQ(seen, table.size());
}

TEST(Schedule, MatchesTheGoldenCurves) {
  const SafetensorsFile want = fixture("schedules");
  for (const auto& [name, kind, decay] : {std::tuple{"cosine", ScheduleConfig::Kind::cosine, 0},
                                          {"wsd", ScheduleConfig::Kind::wsd, 30},
                                          {"constant", ScheduleConfig::Kind::constant, 0}}) {
    const ScheduleConfig c{kind, 1e-3, 1e-5, 10, decay};
    for (int64_t i = 0; i < 100; ++i)
      EXPECT_NEAR(learning_rate(c, i, 100), want.tensor(name).as<double>()[i], 1e-12) << name << " " << i;
  }
}

TEST(Schedule, EdgesOfTheRun) {
  ScheduleConfig c{ScheduleConfig::Kind::cosine, 1e-3, 1e-4, 0, 0};
  EXPECT_EQ(learning_rate(c, 0, 2), 1e-3);      // no warm-up: starts at the peak
  EXPECT_EQ(learning_rate(c, 0, 1), 1e-4);      // one step: the last one
  EXPECT_EQ(learning_rate(c, 500, 100), 1e-4);  // past the end it stays
  c.warmup_steps = 1000;
  EXPECT_GT(learning_rate(c, 0, 2000), 0.0);
}
