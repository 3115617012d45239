// The one table of the run file.  Each row gives a field's path, type, range, default and meaning; the parser, its
// error messages, the JSON schema, the reference page and `--explain` are all made from it (describe.h, parse.h).
// Rows: fields_model.cpp, fields_published.cpp (fields of a published text_config that leave the model as it is) and
// fields_run.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/config/json_reader.h"
#include "src/config/run_config.h"

namespace kestrel {

// What a run file says, before the checks that need several fields: the typed values, the inputs that resolve to
// something else, and where each was written.
struct Draft {
  RunConfig config;
  std::optional<std::vector<int64_t>> full_attn_layers, kda_layers;
  std::optional<int64_t> full_attn_every;
  std::optional<int64_t> num_key_value_heads;

  std::string name;                      // of the run file
  bool model_section_alone = false;      // paths are shown without "model."
  std::map<std::string, Origin> origin;  // of every field that was given, null included

  bool given(const std::string& path) const { return origin.count(path) > 0; }
  std::string shown(const std::string& path) const;
  // ConfigError "file:line: path what."
  [[noreturn]] void refuse(const std::string& path, const std::string& what) const;
};

struct Field {
  enum class Kind { boolean, integer, number, string, choice, integers, strings, any };
  enum class Role {
    effective,
    fixed,          // only the values in `only` exist; others are refused
    informational,  // accepted because published files hold it; no effect on anything
  };

  std::string path;
  std::string meaning;
  Kind kind = Kind::any;
  Role role = Role::effective;
  std::vector<std::string> choices;
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_open = false, max_open = false;
  std::string range_note;  // why the range ends there, and the way out
  bool nullable = false;
  std::string null_means;
  bool is_required = false;
  std::string example;       // JSON; of a required field
  std::string default_note;  // where the default is not one value
  bool printed = true;       // in the resolved configuration
  std::vector<nlohmann::json> only;
  std::function<void(Draft&, const JsonValue&)> set;
  std::function<nlohmann::ordered_json(const Draft&)> get;

  Field& between(double lo, double hi) { return min = lo, max = hi, *this; }
  Field& above(double lo) { return min = lo, min_open = true, *this; }
  Field& below(double hi) { return max = hi, max_open = true, *this; }
  Field& count(double lo) { return between(lo, kMaxSize); }   // of steps, rows, tokens: products of two fit int64
  Field& width(double lo) { return between(lo, kMaxWidth); }  // of a matrix: 16384 experts of width x width fit, too
  Field& note(std::string s) { return range_note = std::move(s), *this; }
  Field& null_is(std::string s) { return null_means = std::move(s), *this; }
  Field& required(std::string json) { return is_required = true, example = std::move(json), *this; }
  Field& default_is(std::string s) { return default_note = std::move(s), *this; }
  Field& input_only() { return printed = false, *this; }

  std::string section() const { return path.substr(0, path.rfind('.')); }
  std::string leaf() const { return path.substr(path.rfind('.') + 1); }
  std::string type_text() const;     // "whole number in [1, 8]", "`a`, `b` or null (what null means)"
  std::string default_text() const;  // JSON, "required", or the note

  static constexpr double kMaxSize = 2147483647;              // 2^31 - 1
  static constexpr double kMaxWidth = 1048576;                // 2^20
  static constexpr double kMaxExact = 9007199254740992.0;     // 2^53: beyond it a double skips integers
  static constexpr double kMaxWhole = 9223372036854775807.0;  // 2^63 - 1, rounded up to 2^63
};

struct Section {
  std::string path;  // "model.balancing"
  std::string meaning;
};

const std::vector<Section>& sections();
const std::vector<Field>& fields();  // grouped by section, in the order of the reference page

const Field* find_field(const std::string& path);
const Section* find_section(const std::string& path);

// The path of the table (field or section) that `path` was probably meant to be, or "".
std::string nearest_path(const std::string& path);

// Type and range by the table, then the value goes where it belongs.  Throws ConfigError.
void set_field(const Field& field, Draft& draft, const JsonValue& value);

// ---- how rows are made

std::vector<Field> model_fields();
std::vector<Field> published_fields();
std::vector<Field> run_fields();

namespace field_detail {

template <class T>
struct Unwrap {
  using type = T;
  static constexpr bool optional = false;
};
template <class T>
struct Unwrap<std::optional<T>> {
  using type = T;
  static constexpr bool optional = true;
};

template <class T>
constexpr Field::Kind kind_of() {
  if constexpr (std::is_same_v<T, bool>) return Field::Kind::boolean;
  if constexpr (std::is_same_v<T, int64_t>) return Field::Kind::integer;
  if constexpr (std::is_same_v<T, double>) return Field::Kind::number;
  if constexpr (std::is_same_v<T, std::string>) return Field::Kind::string;
  if constexpr (std::is_enum_v<T>) return Field::Kind::choice;
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) return Field::Kind::integers;
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return Field::Kind::strings;
}

int64_t whole(const JsonValue& v);  // of a number that set_field has found to be whole

template <class T>
void assign(T& to, const JsonValue& v) {
  if constexpr (Unwrap<T>::optional) {
    if (v.kind == JsonValue::Kind::null) {
      to.reset();
    } else {
      assign(to.emplace(), v);
    }
  } else if constexpr (std::is_same_v<T, int64_t>) {
    to = whole(v);
  } else if constexpr (std::is_enum_v<T>) {
    const auto names = names_of(T{});
    for (size_t i = 0; i < names.size(); ++i) {
      if (v.scalar.get<std::string>() == names[i]) to = static_cast<T>(i);
    }
  } else if constexpr (kind_of<T>() == Field::Kind::integers || kind_of<T>() == Field::Kind::strings) {
    to.assign(v.items.size(), {});
    for (size_t i = 0; i < v.items.size(); ++i) assign(to[i], v.items[i]);
  } else {
    to = v.scalar.get<T>();
  }
}

template <class T>
nlohmann::ordered_json as_json(const T& from) {
  if constexpr (Unwrap<T>::optional) {
    return from ? as_json(*from) : nlohmann::ordered_json(nullptr);
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(to_string(from));
  } else {
    return from;
  }
}

}  // namespace field_detail

// access: (auto& draft) -> auto& , the place of the value in a Draft; its type gives the field's type.
template <class Access>
Field make_field(std::string path, std::string meaning, Access access) {
  using T = std::remove_cvref_t<decltype(access(std::declval<Draft&>()))>;
  using Inner = typename field_detail::Unwrap<T>::type;
  Field f;
  f.path = std::move(path);
  f.meaning = std::move(meaning);
  f.kind = field_detail::kind_of<Inner>();
  f.nullable = field_detail::Unwrap<T>::optional;
  if constexpr (std::is_enum_v<Inner>) {
    for (const std::string_view name : names_of(Inner{})) f.choices.emplace_back(name);
  }
  f.set = [access](Draft& d, const JsonValue& v) { field_detail::assign(access(d), v); };
  f.get = [access](const Draft& d) { return field_detail::as_json(access(d)); };
  return f;
}

}  // namespace kestrel
