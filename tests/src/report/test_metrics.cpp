#include "src/report/metrics.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "kernels/core/error.h"
#include "tests/src/checkpoint/temp_dir.h"

namespace kestrel {
namespace {

using test::error_of;
using test::slurp;
using test::spill;
using test::TempDir;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

MetricLine line_of(int64_t step) {
  return {{"step", step}, {"loss", 1. / static_cast<double>(step)}};
}

void write_steps(const std::string& path, int64_t resumed, int64_t last) {
  MetricsWriter w(path, resumed);
  for (int64_t s = resumed + 1; s <= last; ++s) {
    w.write(line_of(s));
    if (s % 5 == 0) w.write({{"step", s}, {"val_loss", 2.}});
  }
}

TEST(Metrics, FieldsInOrderAndShortestNumbers) {
  EXPECT_EQ(to_json({}), "{}");
  EXPECT_EQ(to_json({{"step", int64_t{7}},
                     {"loss", 0.1},
                     {"lr", 3e-4},
                     {"big", 1e300},
                     {"whole", 2.},
                     {"skipped", false},
                     {"note", "a \"b\"\n\x01 é"},
                     {"balance", std::vector<double>{1, 0.5}},
                     {"none", std::vector<double>{}}}),
            "{\"step\":7,\"loss\":0.1,\"lr\":3e-04,\"big\":1e+300,\"whole\":2,\"skipped\":false,"
            "\"note\":\"a \\\"b\\\"\\n\\u0001 é\",\"balance\":[1,0.5],\"none\":[]}");
  // A name that is not UTF-8 must not lose the line.
  EXPECT_TRUE(nlohmann::json::accept(to_json({{"note", "\xff"}})));
}

TEST(Metrics, NumbersReadBackToTheSameDouble) {
  for (double x : {1. / 3, 5e-324, 1.7976931348623157e308, -0.1, 123456789.123456789}) {
    EXPECT_EQ(nlohmann::json::parse(to_json({{"x", x}}))["x"].get<double>(), x);
  }
}

TEST(Metrics, NonFiniteNumbersAreNullAndNamed) {
  const std::string s = to_json({{"step", int64_t{3}},
                                 {"loss", kNan},
                                 {"grad_norm", kInf},
                                 {"balance", std::vector<double>{1, -kInf}},
                                 {"lr", 1.}});
  EXPECT_EQ(s,
            "{\"step\":3,\"loss\":null,\"grad_norm\":null,\"balance\":[1,null],\"lr\":1,"
            "\"nonfinite\":\"loss=nan grad_norm=inf balance.1=-inf\"}");
  TempDir dir;
  spill(dir.path("m"), s + "\n");
  const auto rows = read_metrics(dir.path("m"));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_TRUE(std::isnan(rows[0].number("loss").value()));
  EXPECT_EQ(rows[0].number("grad_norm"), kInf);
  EXPECT_EQ(rows[0].number("lr"), 1.);
  EXPECT_EQ(rows[0].number("none"), std::nullopt);
}

TEST(Metrics, LinesAreOnDiskAsSoonAsWritten) {
  TempDir dir;
  MetricsWriter w(dir.path("m"), 0);
  w.write(line_of(1));
  EXPECT_EQ(slurp(dir.path("m")), "{\"step\":1,\"loss\":1}\n");
  EXPECT_THROW(w.write({{"loss", 1.}}), ContractError);
  EXPECT_THROW(w.write({{"step", 1.}}), ContractError);
}

TEST(Metrics, ResumedFileEqualsTheUninterruptedOne) {
  TempDir dir(TempDir::Where::memory);
  write_steps(dir.path("whole"), 0, 20);
  const std::string whole = slurp(dir.path("whole"));
  // Killed after step 17, resumed from each checkpoint there could be.
  for (int64_t checkpoint : {0, 1, 4, 5, 10, 17}) {
    write_steps(dir.path("m"), 0, 17);
    write_steps(dir.path("m"), checkpoint, 20);
    EXPECT_EQ(slurp(dir.path("m")), whole) << "resumed from " << checkpoint;
  }
  // Killed in the middle of a line, at every byte of the last two.
  write_steps(dir.path("m"), 0, 17);
  const std::string killed = slurp(dir.path("m"));
  for (size_t n = killed.size() - 40; n <= killed.size(); ++n) {
    spill(dir.path("m"), killed.substr(0, n));
    write_steps(dir.path("m"), 15, 20);
    EXPECT_EQ(slurp(dir.path("m")), whole) << n << " bytes";
  }
}

TEST(Metrics, AFreshRunMovesTheEarlierLinesAside) {
  TempDir dir;
  spill(dir.path("metrics.jsonl"), "first\n");
  spill(dir.path("metrics.1.jsonl"), "older\n");
  EXPECT_EQ(MetricsWriter(dir.path("metrics.jsonl"), 0).kept(), dir.path("metrics.2.jsonl"));
  EXPECT_EQ(slurp(dir.path("metrics.2.jsonl")), "first\n");
  EXPECT_EQ(slurp(dir.path("metrics.1.jsonl")), "older\n");
  EXPECT_EQ(slurp(dir.path("metrics.jsonl")), "");
  EXPECT_EQ(MetricsWriter(dir.path("metrics.jsonl"), 0).kept(), "");  // nothing in it to keep
}

TEST(Metrics, UnfinishedLastLineIsLeftOutAndNamed) {
  TempDir dir;
  std::string unfinished;
  spill(dir.path("m"), "{\"step\":1,\"loss\":2}\n{\"step\":2,\"lo");
  const auto rows = read_metrics(dir.path("m"), &unfinished);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].number("loss"), 2.);
  EXPECT_NE(unfinished.find("m:2: the last line is cut off"), std::string::npos) << unfinished;
  unfinished.clear();
  spill(dir.path("m"), "{\"step\":1,\"loss\":2}\n");
  EXPECT_EQ(read_metrics(dir.path("m"), &unfinished).size(), 1u);
  EXPECT_EQ(unfinished, "");
}

TEST(Metrics, LinesOfNoRunAreRefused) {
  TempDir dir;
  for (const std::string bad : {"noise\n", "noise", "[1]\n", "{\"loss\":3}\n", "{\"step\":2,\"lo\n{\"step\":3}\n", "\n",
                                "{\"step\":1.5}\n", "\xff\n"}) {
    spill(dir.path("m"), "{\"step\":1,\"loss\":2}\n" + bad);
    const std::string message = error_of<DataError>([&] { read_metrics(dir.path("m")); });
    EXPECT_NE(message.find("m:2: "), std::string::npos) << bad << message;
  }
}

TEST(Metrics, ErrorsSayWhereAndWhy) {
  TempDir dir;
  const std::string missing = error_of<DataError>([&] { MetricsWriter w(dir.path("no/m"), 0); });
  EXPECT_NE(missing.find("no/m: No such file"), std::string::npos) << missing;
  const std::string full = error_of<DataError>([&] {
    MetricsWriter w("/dev/full", 0);
    w.write(line_of(1));
  });
  EXPECT_NE(full.find("/dev/full: No space left"), std::string::npos) << full;
  EXPECT_THROW(read_metrics(dir.path("none")), DataError);
}

}  // namespace
}  // namespace kestrel
