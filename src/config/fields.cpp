#include "src/config/fields.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

std::string number_text(double x) {
  if (x == Field::kMaxSize) return "2^31 - 1";
  if (x == Field::kMaxExact) return "2^53";
  if (x == Field::kMaxWhole) return "2^63 - 1";
  return x == std::floor(x) && std::abs(x) < 1e15 ? std::to_string(static_cast<int64_t>(x)) : nlohmann::json(x).dump();
}

std::string range_text(const Field& f) {
  const bool low = std::isfinite(f.min), high = std::isfinite(f.max);
  if (low && high && f.min == f.max) return " equal to " + number_text(f.min);
  if (low && high) {
    return text(" in ", f.min_open ? "(" : "[", number_text(f.min), ", ", number_text(f.max), f.max_open ? ")" : "]");
  }
  if (low) return text(f.min_open ? " above " : " of at least ", number_text(f.min));
  if (high) return text(f.max_open ? " below " : " of at most ", number_text(f.max));
  return "";
}

// "a", "a or b", "a, b or c"
std::string alternatives(const std::vector<std::string>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " or " : ", ";
    out += words[i];
  }
  return out;
}

std::string bare_type_text(const Field& f) {
  switch (f.kind) {
    case Field::Kind::boolean:
      return "true or false";
    case Field::Kind::integer:
      return "whole number" + range_text(f);
    case Field::Kind::number:
      return "number" + range_text(f);
    case Field::Kind::string:
      return "string";
    case Field::Kind::integers:
      return "list of whole numbers" + range_text(f);
    case Field::Kind::strings:
      return "list of strings";
    case Field::Kind::any:
      return "any value";
    case Field::Kind::choice:
      break;
  }
  std::vector<std::string> quoted;
  for (const std::string& c : f.choices) quoted.push_back("\"" + c + "\"");
  return alternatives(quoted);
}

bool in_range(const Field& f, double x) {
  return (f.min_open ? x > f.min : x >= f.min) && (f.max_open ? x < f.max : x <= f.max);
}

bool is_whole(const JsonValue& v) {
  if (v.kind != JsonValue::Kind::number) return false;
  if (v.scalar.is_number_unsigned()) return v.scalar.get<uint64_t>() <= uint64_t{INT64_MAX};
  if (v.scalar.is_number_integer()) return true;
  const double x = v.scalar.get<double>();
  return x == std::floor(x) && std::abs(x) <= Field::kMaxExact;
}

// Whether one value (an element, for lists) has the type and lies in the range.
bool fits(const Field& f, const JsonValue& v) {
  switch (f.kind) {
    case Field::Kind::boolean:
      return v.kind == JsonValue::Kind::boolean;
    case Field::Kind::integer:
    case Field::Kind::integers:
      return is_whole(v) && in_range(f, v.scalar.get<double>());
    case Field::Kind::number:
      return v.kind == JsonValue::Kind::number && in_range(f, v.scalar.get<double>());
    case Field::Kind::string:
    case Field::Kind::strings:
      return v.kind == JsonValue::Kind::string && !v.scalar.get<std::string>().empty();
    case Field::Kind::choice:
      return v.kind == JsonValue::Kind::string &&
             std::find(f.choices.begin(), f.choices.end(), v.scalar.get<std::string>()) != f.choices.end();
    case Field::Kind::any:
      return true;
  }
  return false;
}

// The JSON kind of one value (an element, for lists).
JsonValue::Kind kind_wanted(const Field& f) {
  switch (f.kind) {
    case Field::Kind::boolean:
      return JsonValue::Kind::boolean;
    case Field::Kind::integer:
    case Field::Kind::integers:
    case Field::Kind::number:
      return JsonValue::Kind::number;
    case Field::Kind::string:
    case Field::Kind::strings:
    case Field::Kind::choice:
      return JsonValue::Kind::string;
    case Field::Kind::any:
      break;
  }
  return JsonValue::Kind::object;
}

[[noreturn]] void refuse_value(const Field& f, const Draft& d, const JsonValue& v, const std::string& which) {
  const bool whole_list = which.empty() && (f.kind == Field::Kind::integers || f.kind == Field::Kind::strings);
  const JsonValue::Kind wanted = whole_list ? JsonValue::Kind::array : kind_wanted(f);
  std::string what = text(which, "is ", v.brief());
  if (v.kind == JsonValue::Kind::string && v.scalar.get<std::string>().empty()) {
    what += " (empty)";
  } else if (v.kind != JsonValue::Kind::null && v.kind != wanted) {
    what += " (" + v.kind_name() + ")";
  }
  what += "; expected: " + f.type_text();
  if (!f.range_note.empty()) what += ". " + f.range_note;
  d.refuse(f.path, what);
}

void check_fixed(const Field& f, const Draft& d, const JsonValue& v) {
  std::vector<std::string> accepted;
  for (const nlohmann::json& only : f.only) {
    const bool scalar = v.kind != JsonValue::Kind::array && v.kind != JsonValue::Kind::object;
    if (scalar && v.scalar == only) return;
    accepted.push_back(only.dump());
  }
  d.refuse(f.path,
           text("is ", v.brief(), "; the only value that exists here is ", alternatives(accepted), ". ", f.range_note));
}

// Damerau-Levenshtein distance (adjacent swaps count once).
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  std::iota(d[0].begin(), d[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string leaf_of(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// How far `path` is from `candidate`: by the leaf, with a step for another section.
size_t path_distance(const std::string& path, const std::string& candidate) {
  const bool other_section = parent_of(path) != parent_of(candidate);
  return 2 * edit_distance(leaf_of(path), leaf_of(candidate)) + (other_section ? 1 : 0);
}

}  // namespace

std::string Draft::shown(const std::string& path) const {
  return model_section_alone && path.rfind("model.", 0) == 0 ? path.substr(6) : path;
}

void Draft::refuse(const std::string& path, const std::string& what) const {
  const auto at = origin.find(path);
  const std::string where = at == origin.end() ? name : at->second.text();
  throw ConfigError(text(where, ": ", shown(path), " ", what, what.back() == '.' ? "" : "."));
}

std::string Field::type_text() const {
  if (role == Role::fixed) {
    std::vector<std::string> words;
    for (const nlohmann::json& v : only) words.push_back(v.dump());
    return "only " + alternatives(words);
  }
  std::string out = bare_type_text(*this);
  if (nullable) out += null_means.empty() ? " or null" : " or null (" + null_means + ")";
  return out;
}

std::string Field::default_text() const {
  if (is_required) return "required";
  if (!default_note.empty()) return default_note;
  if (!get) return "";
  return get(Draft{}).dump();
}

const std::vector<Section>& sections() {
  static const std::vector<Section> table = {
      {"model", "The network. Names are those of a published K3 `text_config`, which can be pasted here."},
      {"model.linear_attn_config", "KDA layers, and which layers are KDA or MLA."},
      {"model.balancing", "How each step's expert loads set the next step's router bias."},
      {"data", "Token shards and how rows are cut from them. Relative paths start at the current directory."},
      {"train", "Length, batch, device and precision of the run."},
      {"optimizer", "Muon for matrices and AdamW for the rest, or AdamW for everything."},
      {"schedule",
       "Learning rate: warm-up from the first step, then `kind`; the last step has exactly `min_lr` "
       "(not with `constant`)."},
      {"parallel", "How ranks share the work; data parallelism is what is left of the world size."},
      {"checkpoint", "When and where the state of the run is saved, and what it starts from."},
      {"eval", "Loss on the validation shards during training."},
      {"log", "The run directory and its metrics."},
  };
  return table;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> table = [] {
    std::vector<Field> all = model_fields();
    for (Field& f : published_fields()) all.push_back(std::move(f));
    for (Field& f : run_fields()) all.push_back(std::move(f));
    return all;
  }();
  return table;
}

const Field* find_field(const std::string& path) {
  for (const Field& f : fields()) {
    if (f.path == path) return &f;
  }
  return nullptr;
}

const Section* find_section(const std::string& path) {
  for (const Section& s : sections()) {
    if (s.path == path) return &s;
  }
  return nullptr;
}

std::string nearest_path(const std::string& path) {
  const size_t limit = 2 * std::max<size_t>(1, leaf_of(path).size() / 3) + 1;
  std::string best;
  size_t best_distance = limit + 1;
  const auto consider = [&](const std::string& candidate) {
    const size_t d = path_distance(path, candidate);
    if (d < best_distance) {
      best = candidate;
      best_distance = d;
    }
  };
  for (const Field& f : fields()) {
    if (f.role == Field::Role::effective) consider(f.path);
  }
  for (const Section& s : sections()) consider(s.path);
  return best;
}

void set_field(const Field& f, Draft& d, const JsonValue& v) {
  d.origin[f.path] = v.origin;
  if (f.role == Field::Role::informational) return;
  if (f.role == Field::Role::fixed) return check_fixed(f, d, v);
  if (v.kind == JsonValue::Kind::null) {
    if (!f.nullable) refuse_value(f, d, v, "");
  } else if (f.kind == Field::Kind::integers || f.kind == Field::Kind::strings) {
    if (v.kind != JsonValue::Kind::array) refuse_value(f, d, v, "");
    for (size_t i = 0; i < v.items.size(); ++i) {
      if (!fits(f, v.items[i])) refuse_value(f, d, v.items[i], text("holds a wrong element: [", i, "] "));
    }
  } else if (!fits(f, v)) {
    refuse_value(f, d, v, "");
  }
  f.set(d, v);
}

int64_t field_detail::whole(const JsonValue& v) {
  return v.scalar.is_number_float() ? static_cast<int64_t>(v.scalar.get<double>()) : v.scalar.get<int64_t>();
}

}  // namespace kestrel
