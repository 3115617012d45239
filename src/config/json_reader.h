// JSON with // and /* */ comments, read into a tree in which every value knows its file and line.
//
// Stricter than nlohmann::json, which keeps the last of two equal keys and forgets positions: a duplicate key is an
// error here.  Strings and numbers are still converted by nlohmann.  Throws ConfigError, always with file and line.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace kestrel {

// Where a value was written.
struct Origin {
  std::shared_ptr<const std::string> source;  // a file's path, or "command line"
  int64_t line = 0;                           // from 1; 0: the source has no lines

  std::string text() const;  // "configs/quickstart.json:12"
};

struct JsonMember;

struct JsonValue {
  enum class Kind { null, boolean, number, string, array, object };

  Kind kind = Kind::null;
  nlohmann::json scalar;            // boolean, number, string
  std::vector<JsonValue> items;     // array
  std::vector<JsonMember> members;  // object, in file order, keys distinct
  Origin origin;

  const JsonMember* find(const std::string& key) const;
  JsonMember* find(const std::string& key);
  std::string brief() const;      // the value as JSON on one line, shortened
  std::string kind_name() const;  // "a string", "an object", ...
};

struct JsonMember {
  std::string key;
  JsonValue value;
  Origin origin;  // of the key
};

// `source` names the text in messages; with_lines = false leaves line numbers out (text of a command line).
JsonValue read_json(const std::string& text, const std::string& source, bool with_lines = true);

// What a string of the configuration may hold: UTF-8 without control characters.  Throws ConfigError "where what";
// `where` ends in ": ".
void check_string(const std::string& s, const std::string& where);

// `over` onto `base`: objects merge key by key, at any depth; anything else replaces.
void merge_json(JsonValue& base, JsonValue over);

}  // namespace kestrel
