#include "src/config/run_config.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "kernels/core/error.h"
#include "src/config/checks.h"
#include "src/config/fields.h"
#include "src/config/json_reader.h"

namespace kestrel {
namespace {

namespace fs = std::filesystem;

// ---- text to tree: files, inheritance, overrides

std::string read_file(const std::string& path, const std::string& asked_by) {
  std::error_code ignored;
  const bool directory = fs::is_directory(path, ignored);
  std::ifstream in(path, std::ios::binary);
  if (directory || !in) {
    throw ConfigError(text(asked_by, "cannot read ", path, ": ", directory ? "it is a directory" : std::strerror(errno),
                           ". Give the path of a run file, as in configs/quickstart.json."));
  }
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void require_object(const JsonValue& v, const std::string& what) {
  if (v.kind == JsonValue::Kind::object) return;
  throw ConfigError(
      text(v.origin.text(), ": ", what, " is ", v.brief(), " (", v.kind_name(), "); expected: an object { ... }."));
}

// The tree of a file with what it inherits.  chain: the files that led here, the run file first.
JsonValue inherited(JsonValue own, const std::string& path, std::vector<fs::path> chain) {
  require_object(own, "the run file");
  const auto base = std::find_if(own.members.begin(), own.members.end(), [](auto& m) { return m.key == "base"; });
  if (base == own.members.end()) return own;
  const std::string at = base->origin.text() + ": base ";
  if (base->value.kind != JsonValue::Kind::string) {
    throw ConfigError(text(at, "is ", base->value.brief(), " (", base->value.kind_name(),
                           "); expected: the path of another run file, relative to this one, in quotes."));
  }
  const fs::path target = fs::path(path).parent_path() / base->value.scalar.get<std::string>();
  const fs::path real = fs::weakly_canonical(target);
  chain.push_back(fs::weakly_canonical(path));
  if (std::find(chain.begin(), chain.end(), real) != chain.end()) {
    std::string loop;
    for (const fs::path& file : chain) loop += file.filename().string() + " -> ";
    throw ConfigError(
        text(at, "closes a circle: ", loop, real.filename().string(), ". Remove one of these \"base\" lines."));
  }
  own.members.erase(base);
  const std::string name = target.lexically_normal().string();
  JsonValue tree = inherited(read_json(read_file(name, at), name), name, std::move(chain));
  merge_json(tree, std::move(own));
  return tree;
}

// The right side of an override: JSON where it is JSON, else a string.
JsonValue override_value(const std::string& right, const std::string& name) {
  const bool surely_json = !right.empty() && std::string("{[\"").find(right[0]) != std::string::npos;
  try {
    return read_json(right, name, /*with_lines=*/false);
  } catch (const ConfigError&) {
    if (surely_json) throw;
  }
  check_string(right, name + ": ");
  JsonValue v;
  v.kind = JsonValue::Kind::string;
  v.scalar = right;
  v.origin.source = std::make_shared<const std::string>(name);
  return v;
}

// "train.steps=200" as the tree {"train": {"steps": 200}}.
JsonValue override_tree(const std::string& argument) {
  std::string shown = argument;  // on one line: JSON may have more
  std::replace_if(
      shown.begin(), shown.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  const std::string name = "command line (" + shown + ")";
  const size_t equals = argument.find('=');
  const std::string path = argument.substr(0, equals);
  if (equals == std::string::npos || path.empty() || path.front() == '.' || path.back() == '.') {
    throw ConfigError(text("command line: \"", argument,
                           "\" is not an override; write section.field=value, as in "
                           "train.steps=200 or model.residual=standard."));
  }
  if (path == "base") {
    throw ConfigError(text(name, ": base can only be set in a run file. Write a file with a \"base\" line instead."));
  }
  JsonValue v = override_value(argument.substr(equals + 1), name);
  const Origin origin = v.origin;
  for (size_t end = path.size(); end != std::string::npos;) {
    const size_t dot = path.rfind('.', end - 1);
    const size_t begin = dot == std::string::npos ? 0 : dot + 1;
    JsonValue outer;
    outer.kind = JsonValue::Kind::object;
    outer.origin = origin;
    outer.members.push_back(JsonMember{path.substr(begin, end - begin), std::move(v), origin});
    v = std::move(outer);
    end = dot;
  }
  return v;
}

// ---- tree to values

// The keys that `section` ("" is the top level) takes.
std::vector<std::string> keys_of(const std::string& section) {
  std::vector<std::string> keys;
  for (const Field& f : fields()) {
    if (f.section() == section && f.role == Field::Role::effective) keys.push_back(f.leaf());
  }
  for (const Section& s : sections()) {
    const size_t dot = s.path.rfind('.');
    const std::string parent = dot == std::string::npos ? "" : s.path.substr(0, dot);
    if (parent == section) keys.push_back(s.path.substr(dot + 1));
  }
  return keys;
}

[[noreturn]] void refuse_unknown(const std::string& path, const std::string& section, const JsonMember& m,
                                 const Draft& d) {
  constexpr size_t kShortList = 12;  // a longer one would hide the nearest key that stands before it
  const std::string nearest = nearest_path(path);
  std::string hint = nearest.empty() ? "" : " Did you mean " + d.shown(nearest) + "?";
  if (m.key == "text_config") hint = " This is a whole published config.json: paste what its text_config holds.";
  const std::vector<std::string> keys = keys_of(section);
  if (!hint.empty() && keys.size() > kShortList) {
    hint += " `kestrel config --explain " + section + "` lists all.";
  } else {
    const bool top = section.empty() || d.shown(section + ".").empty();
    hint += (top ? " The top level" : " " + d.shown(section)) + " has: ";
    for (size_t i = 0; i < keys.size(); ++i) hint += (i > 0 ? ", " : "") + keys[i];
    hint += ".";
  }
  throw ConfigError(text(m.origin.text(), ": ", d.shown(path), " is not a field.", hint));
}

void walk(const JsonValue& object, const std::string& section, Draft& d) {
  for (const JsonMember& m : object.members) {
    const std::string path = section.empty() ? m.key : section + "." + m.key;
    if (section.empty() && m.key == "$schema") continue;  // for editors
    if (const Field* f = find_field(path)) {
      set_field(*f, d, m.value);
    } else if (find_section(path)) {
      require_object(m.value, d.shown(path));
      walk(m.value, path, d);
    } else {
      refuse_unknown(path, section, m, d);
    }
  }
}

RunConfig run_of(JsonValue tree, const std::string& path, const std::vector<std::string>& overrides) {
  check_string(fs::path(path).stem().string(), "the name of the run file, after which runs are called: ");
  tree = inherited(std::move(tree), path, {});
  for (const std::string& o : overrides) merge_json(tree, override_tree(o));
  Draft d;
  d.name = path;
  walk(tree, "", d);
  resolve_run(d);
  return d.config;
}

// ---- values to text

// As dump(2), with lists on one line.
void print(std::string& out, const nlohmann::ordered_json& v, int indent) {
  if (!v.is_object()) {
    std::string flat = v.dump();
    if (v.is_array()) {
      flat = "[";
      for (const auto& item : v) flat += (flat.size() > 1 ? ", " : "") + item.dump();
      flat += "]";
    }
    out += flat;
    return;
  }
  out += "{\n";
  bool first = true;
  for (const auto& [key, value] : v.items()) {
    out += (first ? "" : ",\n") + std::string(indent + 2, ' ') + nlohmann::json(key).dump() + ": ";
    print(out, value, indent + 2);
    first = false;
  }
  out += "\n" + std::string(indent, ' ') + "}";
}

nlohmann::ordered_json tree_of(const RunConfig& config) {
  Draft d;
  d.config = config;
  d.full_attn_layers = config.model.full_attn_layers;
  d.kda_layers = config.model.kda_layers();
  nlohmann::ordered_json root;
  for (const Field& f : fields()) {
    if (!f.printed) continue;
    std::string pointer = "/" + f.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    root[nlohmann::ordered_json::json_pointer(pointer)] = f.get(d);
  }
  return root;
}

nlohmann::ordered_json tree_of(const ModelConfig& model) {
  RunConfig config;
  config.model = model;
  return tree_of(config)["model"];
}

std::string pretty(const nlohmann::ordered_json& tree) {
  std::string out;
  print(out, tree, 0);
  return out + "\n";
}

std::string hash_of(const nlohmann::ordered_json& tree) {
  uint64_t h = 14695981039346656037ull;  // FNV-1a, 64 bits
  for (const unsigned char c : tree.dump()) h = (h ^ c) * 1099511628211ull;
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(h));
  return hex;
}

}  // namespace

bool ModelConfig::is_full_attention(int64_t layer) const {
  return std::binary_search(full_attn_layers.begin(), full_attn_layers.end(), layer + 1);
}

bool ModelConfig::is_moe(int64_t layer) const {
  return num_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
}

int64_t ModelConfig::num_moe_layers() const {
  int64_t count = 0;
  for (int64_t l = 0; l < num_hidden_layers; ++l) count += is_moe(l);
  return count;
}

std::vector<int64_t> ModelConfig::kda_layers() const {
  std::vector<int64_t> layers;
  for (int64_t l = 0; l < num_hidden_layers; ++l) {
    if (!is_full_attention(l)) layers.push_back(l + 1);
  }
  return layers;
}

int64_t RunConfig::total_steps() const {
  if (train.steps) return *train.steps;
  return train.tokens ? (*train.tokens - 1) / tokens_per_step() + 1 : 0;
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides) {
  return run_of(read_json(read_file(path, ""), path), path, overrides);
}

RunConfig parse_run_config(const std::string& json_text, const std::string& name,
                           const std::vector<std::string>& overrides) {
  return run_of(read_json(json_text, name), name, overrides);
}

ModelConfig parse_model_config(const std::string& json_text, const std::string& name) {
  const JsonValue tree = read_json(json_text, name);
  require_object(tree, "the model section");
  if (tree.find("model")) {
    throw ConfigError(text(name,
                           " is a whole run file; a model section is wanted, what its \"model\" holds. Of a run or "
                           "checkpoint, `kestrel export-hf` makes a directory with one."));
  }
  Draft d;
  d.name = name;
  d.model_section_alone = true;
  walk(tree, "model", d);
  resolve_model(d);
  return d.config.model;
}

std::string to_json(const RunConfig& config) {
  return pretty(tree_of(config));
}
std::string to_json(const ModelConfig& config) {
  return pretty(tree_of(config));
}
std::string to_portable_json(const RunConfig& config) {
  nlohmann::ordered_json tree = tree_of(config);
  if (config.checkpoint.dir == default_checkpoint_dir(config)) tree["checkpoint"].erase("dir");
  return pretty(tree);
}
std::string config_hash(const RunConfig& config) {
  return hash_of(tree_of(config));
}
std::string config_hash(const ModelConfig& config) {
  return hash_of(tree_of(config));
}

}  // namespace kestrel
