#include "src/report/html.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "kernels/core/error.h"
#include "src/report/progress.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;

constexpr const char *kBlue = "#1f5fbf", *kOrange = "#d9730d", *kGreen = "#2a7d4f", *kPurple = "#7a4bb5",
                     *kRed = "#b8323a";

std::vector<std::pair<double, double>> curve(const std::vector<MetricRow>& rows, const std::string& field) {
  std::vector<std::pair<double, double>> points;
  for (const MetricRow& r : rows) {
    if (const auto y = r.number(field)) points.emplace_back(static_cast<double>(r.step), *y);
  }
  return points;
}

// Mean over the finite points at most `reach` before and after, fewer at the ends so that the curve does not lag.
std::vector<std::pair<double, double>> smoothed(const std::vector<std::pair<double, double>>& points, size_t reach) {
  auto out = points;
  std::vector<double> sum{0}, count{0};  // of the finite points before each
  for (const auto& [x, y] : points) {
    sum.push_back(sum.back() + (std::isfinite(y) ? y : 0));
    count.push_back(count.back() + (std::isfinite(y) ? 1 : 0));
  }
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t r = std::min({reach, i, points.size() - 1 - i});
    const double n = count[i + r + 1] - count[i - r];
    out[i].second = n > 0 ? (sum[i + r + 1] - sum[i - r]) / n : std::nan("");
  }
  return out;
}

std::vector<double> finite_values(const std::vector<MetricRow>& rows, const std::string& field) {
  std::vector<double> out;
  for (const auto& [x, y] : curve(rows, field)) {
    if (std::isfinite(y)) out.push_back(y);
  }
  return out;
}

double median(std::vector<double> v) {
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

std::string number_text(double v, const char* format = "%.4g") {
  char out[64];
  std::snprintf(out, sizeof out, format, v);
  return out;
}

Chart chart_of(const std::vector<MetricRow>& rows, const std::string& title, const std::string& field,
               const char* color, const std::string& y_label) {
  Chart c{title, "step", y_label, {}};
  c.series.push_back({"", curve(rows, field), color});
  return c;
}

std::vector<Chart> charts_of(const std::vector<MetricRow>& rows) {
  std::vector<Chart> out{loss_chart(rows)};
  out.push_back(chart_of(rows, "Learning rate", "lr", kGreen, ""));
  Chart norm = chart_of(rows, "Gradient norm", "grad_norm", kPurple, "norm");
  const auto values = finite_values(rows, "grad_norm");
  if (!values.empty()) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    norm.log_y = *low > 0 && *high > 50 * *low;  // spikes would flatten the rest
  }
  out.push_back(std::move(norm));
  out.push_back(chart_of(rows, "Throughput", "tokens_per_s", kBlue, "tokens/s"));
  if (!curve(rows, "mfu").empty()) out.push_back(chart_of(rows, "Model FLOP utilisation", "mfu", kBlue, "mfu"));
  if (!curve(rows, "max_violation").empty()) {
    out.push_back(chart_of(rows, "Expert balance: worst layer's max load / mean load - 1", "max_violation", kRed,
                           "max violation"));
  }
  return out;
}

constexpr const char* kStyle = R"(
  body { margin: 0; background: #f5f6f8; color: #1c2430; font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto,
         Helvetica, sans-serif; }
  main { max-width: 1500px; margin: 0 auto; padding: 28px 24px 48px; }
  h1 { font-size: 22px; margin: 0 0 18px; }
  dl { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 20px; }
  dl div { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 10px 16px; min-width: 110px; }
  dt { color: #55606e; font-size: 12px; }
  dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
  .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 16px; }
  .charts svg { width: 100%; height: auto; display: block; background: #fff; border: 1px solid #e1e5ea;
                border-radius: 8px; }
  details { margin-top: 20px; background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; padding: 10px 16px; }
  summary { cursor: pointer; font-weight: 600; }
  pre { overflow-x: auto; font-size: 13px; }
)";

void write_text(const fs::path& path, const std::string& content) {
  const fs::path temporary = path.string() + ".tmp";
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out << content;
  out.close();
  std::error_code ec;
  if (out) fs::rename(temporary, path, ec);
  if (!out || ec) {
    const std::string why = ec ? ec.message() : std::strerror(errno);
    fs::remove(temporary, ec);
    throw DataError(text("cannot write ", path.string(), ": ", why, ". Free space, or copy the run elsewhere."));
  }
}

}  // namespace

Chart loss_chart(const std::vector<MetricRow>& rows) {
  Chart c{"Loss", "step", "nats per token", {}};
  const auto train = curve(rows, "loss");
  const bool noisy = train.size() >= 50;
  c.series.push_back({noisy ? "" : "train", train, kBlue, noisy ? 1. : 1.6, noisy ? 0.3 : 1.});
  if (noisy)
    c.series.push_back({"train (smoothed)", smoothed(train, std::max<size_t>(5, train.size() / 100)), kBlue, 2});
  const auto validation = curve(rows, "val_loss");
  if (!validation.empty()) c.series.push_back({"validation", validation, kOrange, 2, 1, validation.size() <= 60});
  return c;
}

std::vector<std::pair<std::string, std::string>> final_figures(const std::vector<MetricRow>& rows) {
  std::vector<std::pair<std::string, std::string>> out;
  int64_t steps = 0;
  for (const MetricRow& r : rows) steps = std::max(steps, r.step);
  out.emplace_back("steps", std::to_string(steps));
  if (const auto tokens = finite_values(rows, "tokens"); !tokens.empty()) {
    out.emplace_back("tokens", count_text(*std::max_element(tokens.begin(), tokens.end())));
  }
  if (const auto loss = finite_values(rows, "loss"); !loss.empty()) {
    const size_t n = std::min<size_t>(loss.size(), 20);
    double mean = 0;
    for (size_t i = loss.size() - n; i < loss.size(); ++i) mean += loss[i] / static_cast<double>(n);
    out.emplace_back(text("train loss, mean of last ", n), number_text(mean, "%.4f"));
  }
  if (const auto loss = finite_values(rows, "val_loss"); !loss.empty()) {
    out.emplace_back("validation loss, last", number_text(loss.back(), "%.4f"));
    out.emplace_back("validation loss, best", number_text(*std::min_element(loss.begin(), loss.end()), "%.4f"));
    out.emplace_back("validation perplexity", number_text(std::exp(loss.back())));
  }
  if (const auto speed = finite_values(rows, "tokens_per_s"); !speed.empty()) {
    out.emplace_back("tokens/s, median", count_text(median(speed)));
  }
  if (const auto ms = finite_values(rows, "step_ms"); !ms.empty()) {
    out.emplace_back("ms per step, median", number_text(median(ms)));
  }
  if (const auto mfu = finite_values(rows, "mfu"); !mfu.empty()) {
    out.emplace_back("MFU, median", number_text(median(mfu)));
  }
  if (const auto v = finite_values(rows, "max_violation"); !v.empty()) {
    out.emplace_back("max violation, last", number_text(v.back(), "%.3f"));
  }
  double skipped = 0;
  for (double s : finite_values(rows, "skipped")) skipped += s;
  if (skipped > 0) out.emplace_back("skipped steps", number_text(skipped));
  return out;
}

std::string report_html(const std::string& title, const std::vector<MetricRow>& rows, const std::string& config_json) {
  std::string h =
      text("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
           "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>", escape_xml(title),
           "</title>\n<style>", kStyle, "</style>\n</head>\n<body>\n<main>\n<h1>", escape_xml(title), "</h1>\n<dl>\n");
  for (const auto& [name, value] : final_figures(rows)) {
    h += text("<div><dt>", escape_xml(name), "</dt><dd>", escape_xml(value), "</dd></div>\n");
  }
  h += "</dl>\n<div class=\"charts\">\n";
  for (const Chart& c : charts_of(rows)) h += svg_of(c);
  h += "</div>\n";
  if (!config_json.empty()) {
    h += text("<details><summary>Run file</summary><pre>", escape_xml(config_json), "</pre></details>\n");
  }
  return h + "</main>\n</body>\n</html>\n";
}

std::string write_report(const std::string& run_dir) {
  const fs::path dir(run_dir);
  const auto rows = read_metrics((dir / "metrics.jsonl").string());
  std::ifstream config(dir / "config.json", std::ios::binary);  // may be missing
  const std::string config_json{std::istreambuf_iterator<char>(config), {}};
  const std::string name = fs::absolute(dir / "x").lexically_normal().parent_path().filename().string();
  write_text(dir / "loss.svg", svg_of(loss_chart(rows)));
  write_text(dir / "report.html", report_html(name, rows, config_json));
  return (dir / "report.html").string();
}

}  // namespace kestrel
