#include "src/report/metrics.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

using nlohmann::json;

std::string quoted(const std::string& s) {
  return json(s).dump(-1, ' ', false, json::error_handler_t::replace);
}

const char* name_of_nonfinite(double x) {
  return std::isnan(x) ? "nan" : (x > 0 ? "inf" : "-inf");
}

double nonfinite_from(const std::string& name) {
  if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
  return (name == "-inf" ? -1 : 1) * std::numeric_limits<double>::infinity();
}

class LineWriter {
 public:
  void add(const std::string& name, const MetricValue& value) {
    text_ += text_.empty() ? "{" : ",";
    text_ += quoted(name) + ":";
    std::visit([&](const auto& v) { put(name, v); }, value);
  }
  std::string finish() {
    if (!nonfinite_.empty()) add("nonfinite", nonfinite_);
    return text_.empty() ? "{}" : text_ + "}";
  }

 private:
  void put(const std::string&, bool v) { text_ += v ? "true" : "false"; }
  void put(const std::string&, int64_t v) { text_ += std::to_string(v); }
  void put(const std::string&, const std::string& v) { text_ += quoted(v); }
  void put(const std::string& name, double v) {
    if (std::isfinite(v)) {
      char digits[32];
      text_.append(digits, std::to_chars(digits, digits + sizeof digits, v).ptr);
      return;
    }
    text_ += "null";
    nonfinite_ += (nonfinite_.empty() ? "" : " ") + name + "=" + name_of_nonfinite(v);
  }
  void put(const std::string& name, const std::vector<double>& list) {
    text_ += "[";
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) text_ += ",";
      put(name + "." + std::to_string(i), list[i]);
    }
    text_ += "]";
  }

  std::string text_, nonfinite_;
};

std::optional<json> parse_line(const std::string& line) {
  json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!j.is_object() || !j.contains("step") || !j["step"].is_number_integer()) return std::nullopt;
  return j;
}

// Bytes of the file that stay: up to the first line of a later step, or that is unfinished.
size_t bytes_kept(const std::string& content, int64_t resumed_step) {
  size_t begin = 0;
  while (begin < content.size()) {
    const size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;
    const auto j = parse_line(content.substr(begin, end - begin));
    if (!j || (*j)["step"].get<int64_t>() > resumed_step) break;
    begin = end + 1;
  }
  return begin;
}

std::string content_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Moves what an earlier run wrote out of the way of a fresh one; returns its new name, or nothing.
std::string keep_earlier(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ec;
  if (!fs::is_regular_file(path, ec) || fs::file_size(path, ec) == 0) return {};
  const fs::path p(path);
  fs::path aside;
  for (int n = 1; aside.empty() || fs::exists(aside, ec); ++n)
    aside = p.parent_path() / text(p.stem().string(), ".", n, p.extension().string());
  fs::rename(p, aside, ec);
  if (ec) {
    throw DataError(text("cannot rename ", path, " of an earlier run to ", aside.string(), ": ", ec.message(),
                         ". Move it away by hand, or set log.dir elsewhere."));
  }
  return aside.string();
}

}  // namespace

std::string to_json(const MetricLine& line) {
  LineWriter w;
  for (const auto& [name, value] : line) w.add(name, value);
  return w.finish();
}

MetricsWriter::MetricsWriter(const std::string& path, int64_t resumed_step)
    : kept_(resumed_step > 0 ? "" : keep_earlier(path)),
      file_(path, "Free space or set log.dir elsewhere, then resume from the last checkpoint.") {
  file_.truncate(resumed_step > 0 ? static_cast<int64_t>(bytes_kept(content_of(path), resumed_step)) : 0);
}

void MetricsWriter::write(const MetricLine& line) {
  const bool has_step = std::any_of(line.begin(), line.end(), [](const auto& field) {
    return field.first == "step" && std::holds_alternative<int64_t>(field.second);
  });
  KESTREL_CHECK(has_step, "a metrics line without an integer step: ", to_json(line));
  file_.append(to_json(line) + "\n");
}

std::optional<double> MetricRow::number(const std::string& name) const {
  for (const auto& [key, value] : numbers) {
    if (key == name) return value;
  }
  return std::nullopt;
}

std::vector<MetricRow> read_metrics(const std::string& path, std::string* unfinished) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw DataError(text("cannot open ", path, ": ", std::strerror(errno), ". Give the folder of a run."));
  std::vector<MetricRow> rows;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    const auto j = parse_line(line);
    if (!j && in.eof() && line.starts_with('{')) {
      if (unfinished) *unfinished = text(path, ":", number, ": the last line is cut off and left out");
      break;
    }
    if (!j) {
      throw DataError(text(path, ":", number, ": ", quoted(line.substr(0, 60)),
                           " is not a line of metrics, a JSON object with a whole number \"step\". Remove the line, or "
                           "give the folder of another run."));
    }
    MetricRow row;
    for (const auto& [name, v] : j->items()) {
      if (v.is_number()) row.numbers.emplace_back(name, v.get<double>());
      if (v.is_boolean()) row.numbers.emplace_back(name, v.get<bool>() ? 1. : 0.);
      if (v.is_array()) {
        std::vector<double> list;
        for (const auto& x : v) list.push_back(x.is_number() ? x.get<double>() : nonfinite_from("nan"));
        row.lists.emplace_back(name, std::move(list));
      }
    }
    row.step = (*j)["step"].get<int64_t>();
    if (j->contains("nonfinite") && (*j)["nonfinite"].is_string()) {
      std::istringstream words((*j)["nonfinite"].get<std::string>());
      std::string word;
      while (words >> word) {
        const size_t eq = word.rfind('=');
        if (eq != std::string::npos) row.numbers.emplace_back(word.substr(0, eq), nonfinite_from(word.substr(eq + 1)));
      }
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace kestrel
