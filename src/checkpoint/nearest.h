// "Did you mean": the known name closest to a wrong one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

namespace kestrel {

// Levenshtein's edit distance.
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// Empty when nothing is close: more than half of the name would have to change.  `names` holds strings or pairs of
// them.
template <class Names>
std::string nearest_name(const std::string& wanted, const Names& names) {
  std::string best;
  size_t best_distance = wanted.size() / 2 + 1;
  for (const auto& item : names) {
    const std::string* name;
    if constexpr (requires { item.first; }) {
      name = &item.first;
    } else {
      name = &item;
    }
    const size_t distance = edit_distance(wanted, *name);
    if (distance < best_distance) {
      best = *name;
      best_distance = distance;
    }
  }
  return best;
}

// A sentence to end an error with: the nearest name, or how many there are.
template <class Names>
std::string name_hint(const std::string& wanted, const Names& names) {
  const std::string near = nearest_name(wanted, names);
  if (!near.empty()) return " Did you mean \"" + near + "\"?";
  if (names.empty()) return " It has none.";
  return " It has " + std::to_string(names.size()) + " names, none of them alike.";
}

}  // namespace kestrel
