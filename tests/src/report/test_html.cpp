#include "src/report/html.h"

#include <cmath>
#include <limits>

#include "kernels/core/error.h"
#include "tests/src/checkpoint/temp_dir.h"

namespace kestrel {
namespace {

using test::slurp;
using test::spill;
using test::TempDir;

size_t count(const std::string& s, const std::string& part) {
  size_t n = 0;
  for (size_t at = s.find(part); at != std::string::npos; at = s.find(part, at + 1)) ++n;
  return n;
}

// Tags are balanced: enough of a parser for what we write.
void expect_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (size_t at = xml.find('<'); at != std::string::npos; at = xml.find('<', at + 1)) {
    const size_t end = xml.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = xml.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" />", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '!' || name == "meta" || tag.back() == '/') continue;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      const std::string closing = tag.substr(1);
      EXPECT_EQ(open.back(), closing);
      open.pop_back();
    } else {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
  }
  EXPECT_TRUE(open.empty());
}

void write_run(const std::string& dir, int steps) {
  MetricsWriter w(dir + "/metrics.jsonl", 0);
  for (int64_t s = 1; s <= steps; ++s) {
    const double x = static_cast<double>(s);
    w.write({{"step", s},
             {"tokens", 1000 * s},
             {"loss", s == 7 ? std::nan("") : 2 + 8 / x},
             {"lr", 1e-3 * x},
             {"grad_norm", 1 + 100 / x},
             {"tokens_per_s", 5000.},
             {"step_ms", 200.},
             {"max_violation", 0.5},
             {"skipped", s == 7}});
    if (s % 10 == 0) w.write({{"step", s}, {"val_loss", 2.1 + 8 / x}});
  }
}

TEST(Report, IsOneSelfContainedFile) {
  TempDir dir;
  write_run(dir.path(), 60);
  spill(dir.path("config.json"), "{\"name\": \"<&>\"}");
  EXPECT_EQ(write_report(dir.path() + "/"), dir.path() + "/report.html");
  const std::string html = slurp(dir.path("report.html"));
  EXPECT_EQ(count(html, "<svg "), 5u);  // loss, lr, grad norm, tokens/s, max violation
  EXPECT_NE(html.find("&lt;&amp;&gt;"), std::string::npos);
  EXPECT_EQ(html.find("<&>"), std::string::npos);
  // Nothing is fetched: the only address is the name space of SVG.
  EXPECT_EQ(count(html, "http"), count(html, "http://www.w3.org/2000/svg"));
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_EQ(html.find("inf"), std::string::npos);
  for (const char* figure : {"<dd>60</dd>", "<dd>60k</dd>", "<dd>5k</dd>", "skipped steps</dt><dd>1<"}) {
    EXPECT_NE(html.find(figure), std::string::npos) << figure;
  }
  expect_well_formed(html.substr(html.find("<html")));
  const std::string svg = slurp(dir.path("loss.svg"));
  EXPECT_EQ(svg.find("<svg xmlns="), 0u);
  expect_well_formed(svg);
  EXPECT_NE(svg.find("validation"), std::string::npos);
}

TEST(Report, WorksWithAlmostNothing) {
  TempDir dir;
  EXPECT_THROW(write_report(dir.path()), DataError);
  spill(dir.path("metrics.jsonl"), "");
  write_report(dir.path());
  EXPECT_NE(slurp(dir.path("loss.svg")).find("no data yet"), std::string::npos);
  spill(dir.path("metrics.jsonl"), "{\"step\":1,\"loss\":3,\"grad_norm\":0}\n");
  write_report(dir.path());
  expect_well_formed(slurp(dir.path("loss.svg")));
  EXPECT_NE(slurp(dir.path("loss.svg")).find("<circle"), std::string::npos) << "a single point must be seen";
}

TEST(Report, DiskFull) {
  TempDir dir;
  write_run(dir.path(), 60);
  spill(dir.path("report.html"), "old");
  {
    test::FullDisk disk(2000);
    EXPECT_THROW(write_report(dir.path()), DataError);
  }
  EXPECT_EQ(slurp(dir.path("report.html")), "old");
}

TEST(Svg, RoundTicks) {
  EXPECT_EQ(round_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(round_ticks(2.3, 4.4, 4), (std::vector<double>{2.5, 3, 3.5, 4}));
  EXPECT_EQ(round_ticks(-1, 1, 4), (std::vector<double>{-1, -0.5, 0, 0.5, 1}));
  EXPECT_EQ(round_ticks(3, 3, 4), (std::vector<double>{3}));
}

TEST(Svg, SpikesOfLongSeriesSurviveThinning) {
  Chart c{"t", "x", "y", {}};
  Series s{"s", {}, "#000"};
  for (int i = 0; i < 100'000; ++i) s.points.emplace_back(i, i == 51'234 ? 1000. : 1.);
  c.series.push_back(s);
  const std::string svg = svg_of(c);
  EXPECT_LT(svg.size(), 100'000u);
  // The spike is the highest point: 4% below the top of the plot area (y = 40 of 340, 254 high).
  EXPECT_NE(svg.find(" 49.41"), std::string::npos) << "the spike is gone";
}

TEST(Svg, GapsWhereValuesAreNotFinite) {
  Chart c{"t", "x", "y", {}};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  c.series.push_back({"s", {{1, 1}, {2, 2}, {3, nan}, {4, 2}, {5, 1}, {6, -1}}, "#000"});
  EXPECT_EQ(count(svg_of(c), "<path"), 2u);
  c.log_y = true;  // -1 has no logarithm
  EXPECT_EQ(count(svg_of(c), "<path"), 2u);
  EXPECT_EQ(svg_of(c).find("nan"), std::string::npos);
}

}  // namespace
}  // namespace kestrel
