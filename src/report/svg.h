// Line charts as SVG text: complete pictures with axes, grid and legend, no scripts, no fonts to load.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kestrel {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // (x, y) in order of x; a y that is not finite breaks the line
  std::string color;                              // "#1f5fbf"
  double width = 1.6;
  double opacity = 1;
  bool dots = false;  // mark every point: for few of them
};

struct Chart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  bool log_y = false;  // points with y <= 0 break the line
  int width = 720, height = 340;
};

// Long series are thinned to the lowest and highest point of each pixel column, so that no spike is lost.
std::string svg_of(const Chart& chart);

// About `count` round numbers that span [low, high].
std::vector<double> round_ticks(double low, double high, int count);

std::string escape_xml(const std::string& s);

}  // namespace kestrel
