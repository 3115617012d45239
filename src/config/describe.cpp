#include "src/config/describe.h"

#include <cmath>
#include <vector>

#include "kernels/core/error.h"
#include "src/config/fields.h"

namespace kestrel {
namespace {

using nlohmann::ordered_json;

// ---- schema

ordered_json choices_schema(const std::vector<nlohmann::json>& values) {
  ordered_json out;
  out["enum"] = ordered_json::array();
  for (const nlohmann::json& v : values) out["enum"].push_back(ordered_json(v));
  return out;
}

void add_range(ordered_json& s, const Field& f) {
  if (std::isfinite(f.min)) s[f.min_open ? "exclusiveMinimum" : "minimum"] = f.min;
  if (std::isfinite(f.max)) s[f.max_open ? "exclusiveMaximum" : "maximum"] = f.max;
}

ordered_json type_schema(const Field& f) {
  ordered_json s = ordered_json::object();
  switch (f.kind) {
    case Field::Kind::boolean:
      s["type"] = "boolean";
      break;
    case Field::Kind::integer:
    case Field::Kind::number:
      s["type"] = f.kind == Field::Kind::integer ? "integer" : "number";
      add_range(s, f);
      break;
    case Field::Kind::string:
      s["type"] = "string";
      s["minLength"] = 1;
      break;
    case Field::Kind::integers:
      s["type"] = "array";
      s["items"]["type"] = "integer";
      add_range(s["items"], f);
      s["uniqueItems"] = true;
      break;
    case Field::Kind::strings:
      s["type"] = "array";
      s["items"]["type"] = "string";
      s["items"]["minLength"] = 1;
      break;
    case Field::Kind::choice:
      s["enum"] = f.choices;
      break;
    case Field::Kind::any:
      break;
  }
  if (f.nullable && s.contains("type")) s["type"] = {s["type"], "null"};
  return s;
}

ordered_json field_schema(const Field& f) {
  ordered_json s = f.role == Field::Role::fixed ? choices_schema(f.only) : type_schema(f);
  s["description"] = f.meaning;
  if (f.get && !f.is_required && f.default_note.empty()) s["default"] = f.get(Draft{});
  return s;
}

// The properties object that holds `path`'s own, inside the schema of the whole file.
ordered_json& properties_of(ordered_json& root, const std::string& section) {
  ordered_json* at = &root;
  for (size_t begin = 0; begin < section.size();) {
    const size_t end = std::min(section.find('.', begin), section.size());
    at = &(*at)["properties"][section.substr(begin, end - begin)];
    begin = end + 1;
  }
  return *at;
}

// ---- reference page

std::string escaped(std::string s) {
  for (size_t i = 0; (i = s.find('|', i)) != std::string::npos; i += 2) s.insert(i, "\\");
  return s;
}

std::string in_code(const std::string& s) {
  return s.empty() ? "" : "`" + s + "`";
}

std::string default_cell(const Field& f) {
  const bool words = f.is_required || !f.default_note.empty();
  return words ? f.default_text() : in_code(f.default_text());
}

void add_row(std::string& out, const Field& f) {
  out += text("| `", f.leaf(), "` | ", escaped(f.type_text()), " | ", escaped(default_cell(f)), " | ",
              escaped(f.meaning), f.range_note.empty() ? "" : " " + escaped(f.range_note), " |\n");
}

void add_section(std::string& out, const Section& s) {
  out += text("\n## `", s.path, "`\n\n", s.meaning, "\n\n| field | values | default | meaning |\n|---|---|---|---|\n");
  for (const Field& f : fields()) {
    if (f.section() == s.path && f.role == Field::Role::effective) add_row(out, f);
  }
}

// The fields of a published text_config that change nothing, grouped by meaning.
void add_published(std::string& out) {
  out +=
      "\nFields of a published `text_config` with one accepted value:\n\n| field | values | meaning |\n|---|---|---|\n";
  for (const Field& f : fields()) {
    if (f.role != Field::Role::fixed) continue;
    out += text("| `", f.leaf(), "` | ", f.type_text(), " | ", f.meaning, " ", f.range_note, " |\n");
  }
  out += "\nFields that are accepted because published files hold them, and that are informational:\n\n";
  std::string meaning;
  for (const Field& f : fields()) {
    if (f.role != Field::Role::informational) continue;
    if (f.meaning != meaning) out += text(meaning.empty() ? "" : "\n", "- ", f.meaning);
    out += text(" `", f.leaf(), "`");
    meaning = f.meaning;
  }
  out += "\n";
}

// ---- explain

std::string explanation(const Field& f) {
  std::string out = text(f.path, "\n  ", f.meaning, "\n");
  if (f.role == Field::Role::informational) return out;
  out += text("  values:  ", f.type_text(), "\n");
  if (const std::string value = f.default_text(); !value.empty()) out += text("  default: ", value, "\n");
  if (f.is_required) out += text("  example: \"", f.leaf(), "\": ", f.example, "\n");
  if (!f.range_note.empty()) out += text("  note:    ", f.range_note, "\n");
  return out;
}

bool ends_with_path(const std::string& path, const std::string& end) {
  if (path == end) return true;
  const std::string tail = "." + end;
  return path.size() > tail.size() && path.compare(path.size() - tail.size(), tail.size(), tail) == 0;
}

bool inside(const std::string& path, const std::string& section) {
  return path.rfind(section + ".", 0) == 0;
}

}  // namespace

std::string config_schema() {
  ordered_json root;
  root["$schema"] = "http://json-schema.org/draft-07/schema#";
  root["title"] = "Kestrel run file";
  root["type"] = "object";
  root["additionalProperties"] = false;
  root["properties"]["$schema"] = {{"type", "string"}, {"description", "This schema, for editors."}};
  root["properties"]["base"] = {
      {"type", "string"},
      {"minLength", 1},
      {"description", "A run file to inherit from, relative to this one. Objects merge, everything else replaces."}};
  for (const Section& s : sections()) {
    ordered_json& at = properties_of(root, s.path);
    at["type"] = "object";
    at["description"] = s.meaning;
    at["additionalProperties"] = false;
    at["properties"] = ordered_json::object();
  }
  for (const Field& f : fields()) properties_of(root, f.section())["properties"][f.leaf()] = field_schema(f);
  return root.dump(2) + "\n";
}

std::string config_reference() {
  std::string out =
      "# The run file\n\n"
      "Written by `kestrel config --reference` from the table that also drives the parser.\n\n"
      "JSON with `//` and `/* */` comments. Unknown and duplicate keys are errors. `\"base\": \"other.json\"` inherits "
      "from another file (its path is relative to the file that says so): objects merge, lists and values replace, and "
      "null sets a field back to \"not given\" where null is one of its values. Overrides follow the file's name on "
      "the command line, `train.steps=200 model.residual=standard`; the last of two wins. A whole number may be "
      "written `1e9`. Relative paths of data and outputs start at the current directory.\n";
  for (const Section& s : sections()) {
    add_section(out, s);
    if (s.path == "model") add_published(out);
  }
  return out;
}

std::string explain_field(const std::string& path) {
  std::string out;
  const auto add = [&](const std::string& block) { out += (out.empty() ? "" : "\n") + block; };
  for (const Section& s : sections()) {
    if (!ends_with_path(s.path, path)) continue;
    add(text(s.path, "\n  ", s.meaning, "\n"));
    for (const Field& f : fields()) {
      if (inside(f.path, s.path) && f.role == Field::Role::effective) add(explanation(f));
    }
  }
  if (!out.empty()) return out;
  for (const Field& f : fields()) {
    if (ends_with_path(f.path, path)) add(explanation(f));
  }
  if (!out.empty()) return out;
  const std::string nearest = nearest_path(path);
  throw ConfigError(text("\"", path, "\" is not a field of the run file.",
                         nearest.empty() ? "" : " Did you mean " + nearest + "?",
                         " `kestrel config --reference` lists all."));
}

}  // namespace kestrel
