// Hugging Face's tokenizer.json, read strictly and written.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/core/error.h"
#include "src/checkpoint/files.h"
#include "src/checkpoint/json_strict.h"
#include "src/data/byte_level.h"
#include "src/data/tokenizer.h"

namespace kestrel {
namespace {

using nlohmann::json;
using ordered = nlohmann::ordered_json;

struct Reader {
  std::string path;
  json root;

  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError(text(path, ": ", what,
                         ". Kestrel reads byte-level BPE with the split patterns cl100k and gpt2 and nothing else that "
                         "changes text; it would encode differently from this file's author, so the file is refused."));
  }
  void allow_keys(const json& object, const std::string& where, std::initializer_list<const char*> allowed) const {
    for (const auto& [key, value] : object.items()) {
      bool known = false;
      for (const char* a : allowed) known = known || key == a;
      if (!known) refuse(text(where, " has the key \"", key, "\", which is not known"));
    }
  }
  // The value at `key`, or null when missing.
  static const json& at(const json& object, const char* key) {
    static const json kNull;
    const auto it = object.find(key);
    return it == object.end() ? kNull : *it;
  }
  static bool is(const json& object, const char* key, const json& value) { return at(object, key) == value; }
  void require_absent(const json& object, const std::string& where, std::initializer_list<const char*> keys) const {
    for (const char* k : keys) {
      const json& v = at(object, k);
      if (!v.is_null() && v != json(false) && v != json("") && v != json(0.0)) {
        refuse(text(where, k, " is ", v.dump().substr(0, 80), ", only null is supported"));
      }
    }
  }

  SplitPattern byte_level_pattern(const json& p) const {
    if (at(p, "add_prefix_space") == json(true))
      refuse("pre_tokenizer adds a space before the text (add_prefix_space)");
    return SplitPattern::gpt2;
  }

  SplitPattern pattern() const {
    const json& p = at(root, "pre_tokenizer");
    if (!p.is_object()) refuse("it has no pre_tokenizer");
    if (is(p, "type", "ByteLevel") && !is(p, "use_regex", false)) return byte_level_pattern(p);
    const json& list = at(p, "pretokenizers");
    if (!is(p, "type", "Sequence") || !list.is_array() || list.size() != 2 || !is(list[0], "type", "Split") ||
        !is(list[1], "type", "ByteLevel") || !is(list[1], "use_regex", false)) {
      refuse("pre_tokenizer is neither ByteLevel nor Split followed by ByteLevel without a regex");
    }
    byte_level_pattern(list[1]);
    if (!is(list[0], "behavior", "Isolated") || is(list[0], "invert", true)) {
      refuse("pre_tokenizer's Split is not \"Isolated\", or inverted");
    }
    const json& regex = at(at(list[0], "pattern"), "Regex");
    const auto known = regex.is_string() ? pattern_from_regex(regex.get<std::string>()) : std::nullopt;
    if (!known)
      refuse(text("pre_tokenizer splits by ", regex.dump(), ", which is not one of the patterns cl100k, gpt2"));
    return *known;
  }

  std::vector<TokenizerParts::Special> specials() const {
    std::vector<TokenizerParts::Special> found;
    for (const json& t : at(root, "added_tokens")) {
      if (!t.is_object() || !at(t, "id").is_number_integer() || !at(t, "content").is_string()) {
        refuse(text("added token ", t.dump(), " has no id and content"));
      }
      require_absent(t, text("added token ", at(t, "content").dump(), ": "), {"single_word", "lstrip", "rstrip"});
      const int64_t id = at(t, "id").get<int64_t>();
      if (id < 0 || id > INT32_MAX) refuse(text("added token ", t.dump(), " has an id outside 0 to ", INT32_MAX));
      found.push_back({static_cast<int32_t>(id), at(t, "content").get<std::string>()});
    }
    return found;
  }

  // Fills tokens[id]; every id of [0, size) exactly once.
  std::vector<std::string> tokens(const std::vector<TokenizerParts::Special>& added) const {
    const json& vocab = at(at(root, "model"), "vocab");
    if (!vocab.is_object() || vocab.empty()) refuse("model.vocab is missing or empty");
    StringMap<int32_t> names;
    for (const auto& s : added) names.emplace(s.content, s.id);
    size_t size = vocab.size();
    for (const auto& s : added) size += !vocab.contains(s.content);
    std::vector<std::string> tokens(size);
    std::vector<uint8_t> seen(size, 0);
    const auto set = [&](int64_t id, std::string bytes, const std::string& spelled) {
      if (id < 0 || id >= static_cast<int64_t>(size) || seen[static_cast<size_t>(id)]) {
        throw DataError(text(path, ": token \"", spelled, "\" has id ", id, ", which is taken or outside 0 to ",
                             size - 1,
                             ". Ids must run without holes from 0; the file is damaged or has duplicate tokens."));
      }
      seen[static_cast<size_t>(id)] = 1;
      tokens[static_cast<size_t>(id)] = std::move(bytes);
    };
    for (const auto& [spelled, id] : vocab.items()) {
      if (!id.is_number_integer()) refuse(text("token \"", spelled, "\" has the id ", id.dump()));
      const auto special = names.find(spelled);
      const auto bytes = special == names.end() ? from_byte_level(spelled) : spelled;
      if (!bytes) refuse(text("token \"", spelled, "\" has a character outside the byte-level alphabet"));
      set(id.get<int64_t>(), *bytes, spelled);
    }
    for (const auto& s : added) {
      if (!vocab.contains(s.content)) set(s.id, s.content, s.content);
    }
    return tokens;
  }

  // "a b" or ["a", "b"].
  std::pair<std::string, std::string> merge_sides(const json& m) const {
    if (m.is_array() && m.size() == 2 && m[0].is_string() && m[1].is_string()) {
      return {m[0].get<std::string>(), m[1].get<std::string>()};
    }
    const std::string s = m.is_string() ? m.get<std::string>() : "";
    const size_t space = s.find(' ');
    if (space == std::string::npos || s.find(' ', space + 1) != std::string::npos) {
      refuse(text("merge ", m.dump(), " is not a pair of tokens"));
    }
    return {s.substr(0, space), s.substr(space + 1)};
  }

  std::vector<TokenizerParts::Merge> merges() const {
    const json& model = at(root, "model");
    const json& vocab = at(model, "vocab");
    const json& list = at(model, "merges");
    if (!list.is_array()) refuse("model.merges is missing");
    const auto id = [&](const std::string& token, const json& m) {
      const auto it = vocab.find(token);
      if (it == vocab.end()) {
        throw DataError(text(path, ": merge ", m.dump(), " needs the token \"", token,
                             "\", which the vocabulary does not have. The file is damaged."));
      }
      return it->get<int32_t>();
    };
    std::vector<TokenizerParts::Merge> merges;
    for (const json& m : list) {
      const auto [a, b] = merge_sides(m);
      merges.push_back({id(a, m), id(b, m), id(a + b, m)});
    }
    return merges;
  }

  TokenizerParts parts() const {
    allow_keys(root, "the file",
               {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                "decoder", "model"});
    require_absent(root, "", {"truncation", "padding", "normalizer"});
    if (!is(at(root, "decoder"), "type", "ByteLevel")) refuse("decoder is not ByteLevel");
    const json& model = at(root, "model");
    if (!is(model, "type", "BPE")) refuse(text("model.type is ", at(model, "type").dump(), ", not \"BPE\""));
    allow_keys(model, "model",
               {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                "byte_fallback", "ignore_merges", "vocab", "merges"});
    require_absent(
        model, "model.",
        {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"});
    TokenizerParts p;
    p.pattern = pattern();
    p.whole_piece_first = is(model, "ignore_merges", true);
    p.specials = specials();
    p.tokens = tokens(p.specials);
    p.merges = merges();
    return p;
  }
};

ordered byte_level_json(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

ordered pre_tokenizer_json(SplitPattern pattern) {
  if (pattern == SplitPattern::gpt2) return byte_level_json(true);
  const ordered split = {{"type", "Split"},
                         {"pattern", {{"Regex", std::string(regex_of(pattern))}}},
                         {"behavior", "Isolated"},
                         {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", ordered::array({split, byte_level_json(false)})}};
}

ordered to_json(const Tokenizer& t) {
  const TokenizerParts& p = t.parts();
  std::vector<std::string> spelled(p.tokens.size());
  for (size_t i = 0; i < spelled.size(); ++i) {
    spelled[i] = t.is_special(static_cast<int32_t>(i)) ? p.tokens[i] : to_byte_level(p.tokens[i]);
  }
  ordered added = ordered::array(), merges = ordered::array();
  for (const auto& s : p.specials) {
    added.push_back({{"id", s.id},
                     {"content", s.content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  for (const auto& m : p.merges) {
    merges.push_back(ordered::array({spelled[static_cast<size_t>(m.left)], spelled[static_cast<size_t>(m.right)]}));
  }
  // An ordered object looks each key up when it is added; a sequence of pairs does not.
  std::vector<std::pair<std::string, ordered>> vocab;
  for (size_t i = 0; i < spelled.size(); ++i) vocab.emplace_back(spelled[i], i);
  ordered vocab_object = ordered::object();
  auto& object = vocab_object.get_ref<ordered::object_t&>();
  object.reserve(vocab.size());
  for (auto& [k, v] : vocab) static_cast<std::vector<ordered::object_t::value_type>&>(object).emplace_back(k, v);
  ordered model = {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", p.whole_piece_first}};
  model["vocab"] = std::move(vocab_object);
  model["merges"] = std::move(merges);
  return {{"version", "1.0"},          {"truncation", nullptr},
          {"padding", nullptr},        {"added_tokens", std::move(added)},
          {"normalizer", nullptr},     {"pre_tokenizer", pre_tokenizer_json(p.pattern)},
          {"post_processor", nullptr}, {"decoder", byte_level_json(true)},
          {"model", std::move(model)}};
}

}  // namespace

Tokenizer Tokenizer::load(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw DataError(
        text("there is no tokenizer file ", path,
             ". Name a tokenizer.json (--tokenizer, data.tokenizer); `kestrel tokenizer train` makes one."));
  }
  const Reader reader{path, parse_json_strict(read_file(path), path)};
  try {
    if (!reader.root.is_object()) reader.refuse("it is not a JSON object");
    return Tokenizer(reader.parts(), path);
  } catch (const json::exception& e) {
    throw DataError(
        text(path, " is not a usable tokenizer.json: ", e.what(), ". `kestrel tokenizer train` makes one."));
  }
}

void Tokenizer::save(const std::string& path) const {
  write_file(path, to_json(*this).dump(1) + "\n");
}

}  // namespace kestrel
