#include "src/report/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "kernels/core/error.h"
#include "src/report/progress.h"

namespace kestrel {
namespace {

constexpr double kLeft = 70, kRight = 16, kTop = 40, kBottom = 46;
constexpr const char* kFont = "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, sans-serif\"";

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void include(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  bool empty() const { return low > high; }
};

// One number at most 0.01 pixels off, without trailing zeros.
std::string px(double v) {
  char out[32];
  std::snprintf(out, sizeof out, "%.2f", v);
  std::string s = out;
  s.erase(s.find_last_not_of('0') + 1);
  if (s.back() == '.') s.pop_back();
  return s;
}

// `largest` is that of the axis: its marks share one notation.
std::string tick_text(double v, double largest) {
  if (v == 0) return "0";
  if (largest >= 10000) return count_text(v);
  char out[32];
  std::snprintf(out, sizeof out, largest < 0.01 ? "%.1e" : "%.4g", v);
  return out;
}

class Plot {
 public:
  explicit Plot(const Chart& c) : c_(c) {
    for (const Series& s : c.series) {
      for (const auto& [x, y] : s.points) {
        if (!drawable(y)) continue;
        x_range_.include(x);
        y_range_.include(scaled(y));
      }
    }
    empty_ = x_range_.empty();
    if (empty_) x_range_ = y_range_ = {0, 1};
    widen(x_range_, 0);
    widen(y_range_, 0.04);
  }

  std::string draw() const {
    std::string svg = text("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", c_.width, " ", c_.height,
                           "\" width=\"", c_.width, "\" height=\"", c_.height, "\" role=\"img\" aria-label=\"",
                           escape_xml(c_.title), "\" ", kFont, ">\n");
    svg += "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
    svg += label(kLeft, 22, "start", 14, "#1c2430", c_.title, "font-weight=\"600\"");
    svg += grid();
    for (const Series& s : c_.series) svg += line(s);
    svg += legend();
    if (empty_) svg += label(c_.width / 2., c_.height / 2., "middle", 13, "#6b7685", "no data yet");
    return svg + "</svg>\n";
  }

 private:
  bool drawable(double y) const { return std::isfinite(y) && (!c_.log_y || y > 0); }
  double scaled(double y) const { return c_.log_y ? std::log10(y) : y; }
  static void widen(Range& r, double margin) {
    if (r.high == r.low) {
      const double d = r.low == 0 ? 1 : 0.1 * std::fabs(r.low);
      r = {r.low - d, r.high + d};
    }
    const double m = margin * (r.high - r.low);
    r = {r.low - m, r.high + m};
  }
  double at_x(double x) const {
    return kLeft + (x - x_range_.low) / (x_range_.high - x_range_.low) * (c_.width - kLeft - kRight);
  }
  double at_scaled_y(double y) const {
    return c_.height - kBottom - (y - y_range_.low) / (y_range_.high - y_range_.low) * (c_.height - kTop - kBottom);
  }

  static std::string label(double x, double y, const char* anchor, int size, const char* color, const std::string& s,
                           const std::string& more = "") {
    return text("<text x=\"", px(x), "\" y=\"", px(y), "\" text-anchor=\"", anchor, "\" font-size=\"", size,
                "\" fill=\"", color, "\" ", more, ">", escape_xml(s), "</text>\n");
  }
  static std::string rule(double x1, double y1, double x2, double y2, const char* color) {
    return text("<line x1=\"", px(x1), "\" y1=\"", px(y1), "\" x2=\"", px(x2), "\" y2=\"", px(y2), "\" stroke=\"",
                color, "\"/>\n");
  }

  // Values at which the y axis is marked, as scaled.
  std::vector<std::pair<double, std::string>> y_ticks() const {
    std::vector<std::pair<double, std::string>> out;
    const double largest =
        c_.log_y ? std::pow(10., y_range_.high) : std::max(std::fabs(y_range_.low), std::fabs(y_range_.high));
    const auto add = [&](double v, double scaled_v) {
      if (scaled_v >= y_range_.low && scaled_v <= y_range_.high) out.emplace_back(scaled_v, tick_text(v, largest));
    };
    if (c_.log_y) {
      const bool few_decades = y_range_.high - y_range_.low < 2.5;
      for (int e = static_cast<int>(std::floor(y_range_.low)); e <= y_range_.high; ++e) {
        for (int m : {1, 2, 5}) {
          if (m == 1 || few_decades) add(m * std::pow(10., e), std::log10(m) + e);
        }
      }
    } else {
      for (double v : round_ticks(y_range_.low, y_range_.high, 5)) add(v, v);
    }
    return out;
  }

  std::string grid() const {
    std::string svg;
    const double right = c_.width - kRight, bottom = c_.height - kBottom;
    for (const auto& [v, name] : y_ticks()) {
      const double y = at_scaled_y(v);
      svg += rule(kLeft, y, right, y, "#e6e9ee");
      svg += label(kLeft - 8, y + 4, "end", 11, "#55606e", name);
    }
    for (double v : round_ticks(x_range_.low, x_range_.high, 7)) {
      if (v < x_range_.low || v > x_range_.high) continue;
      svg += rule(at_x(v), bottom, at_x(v), bottom + 4, "#9aa3af");
      svg += label(at_x(v), bottom + 17, "middle", 11, "#55606e", tick_text(v, std::fabs(x_range_.high)));
    }
    svg += rule(kLeft, bottom, right, bottom, "#9aa3af");
    svg += label((kLeft + right) / 2, c_.height - 10., "middle", 12, "#55606e", c_.x_label);
    const double middle = (kTop + bottom) / 2;
    svg +=
        label(14, middle, "middle", 12, "#55606e", c_.y_label, text("transform=\"rotate(-90 14 ", px(middle), ")\""));
    return svg;
  }

  std::string legend() const {
    std::string svg;
    double x = c_.width - kRight;
    for (auto s = c_.series.rbegin(); s != c_.series.rend(); ++s) {
      if (s->name.empty()) continue;
      svg += label(x, 22, "end", 12, "#333c48", s->name);
      x -= 6.6 * static_cast<double>(s->name.size()) + 22;  // a bit more than the text is wide
      svg += text("<line x1=\"", px(x), "\" y1=\"18\" x2=\"", px(x + 16), "\" y2=\"18\" stroke=\"", s->color,
                  "\" stroke-width=\"2.5\"/>\n");
      x -= 14;
    }
    return svg;
  }

  using Points = std::vector<std::pair<double, double>>;  // in pixels

  // Unbroken stretches of a series.
  std::vector<Points> stretches(const Series& s) const {
    std::vector<Points> out(1);
    for (const auto& [x, y] : s.points) {
      if (drawable(y)) {
        out.back().emplace_back(at_x(x), at_scaled_y(scaled(y)));
      } else if (!out.back().empty()) {
        out.emplace_back();
      }
    }
    return out;
  }

  static Points thinned(const Points& points) {
    if (points.size() < 2000) return points;
    Points out;
    for (size_t i = 0; i < points.size();) {
      size_t low = i, high = i, j = i;
      for (; j < points.size() && std::floor(points[j].first) == std::floor(points[i].first); ++j) {
        if (points[j].second < points[low].second) low = j;
        if (points[j].second > points[high].second) high = j;
      }
      out.push_back(points[std::min(low, high)]);
      if (low != high) out.push_back(points[std::max(low, high)]);
      i = j;
    }
    return out;
  }

  std::string line(const Series& s) const {
    std::string svg;
    for (const Points& stretch : stretches(s)) {
      if (stretch.empty()) continue;
      const bool dots = s.dots || stretch.size() == 1;
      std::string path, marks;
      for (const auto& [x, y] : thinned(stretch)) {
        path += (path.empty() ? "M" : " L") + px(x) + " " + px(y);
        if (dots) marks += text("<circle cx=\"", px(x), "\" cy=\"", px(y), "\" r=\"2.6\" fill=\"", s.color, "\"/>\n");
      }
      svg += text("<path d=\"", path, "\" fill=\"none\" stroke=\"", s.color, "\" stroke-width=\"", s.width,
                  "\" stroke-opacity=\"", s.opacity, "\" stroke-linejoin=\"round\"/>\n", marks);
    }
    return svg;
  }

  const Chart& c_;
  Range x_range_, y_range_;
  bool empty_ = false;
};

}  // namespace

std::vector<double> round_ticks(double low, double high, int count) {
  const double rough = (high - low) / std::max(count, 1);
  if (!(rough > 0) || !std::isfinite(rough)) return {low};
  const double power = std::pow(10., std::floor(std::log10(rough)));
  const double m = rough / power;
  const double step = (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10) * power;
  std::vector<double> out;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k)
    out.push_back(k * step + 0.);  // no -0
  return out;
}

std::string escape_xml(const std::string& s) {
  std::string out;
  for (char c : s) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string svg_of(const Chart& chart) {
  return Plot(chart).draw();
}

}  // namespace kestrel
