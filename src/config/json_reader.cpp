#include "src/config/json_reader.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

constexpr int kMaxDepth = 64;        // far beyond any run file; a bound on recursion
constexpr size_t kBriefLength = 60;  // of a value quoted in a message
constexpr std::string_view kBom = "\xef\xbb\xbf";

class Reader {
 public:
  Reader(const std::string& text, const std::string& source, bool with_lines)
      : text_(text), source_(std::make_shared<const std::string>(source)), with_lines_(with_lines) {
    if (text_.rfind(kBom, 0) == 0) at_ = kBom.size();
  }

  JsonValue document() {
    skip_space();
    JsonValue v = value(0);
    skip_space();
    if (at_ < text_.size()) fail(text("unexpected ", quoted_here(), " after the end of the JSON value; remove it"));
    return v;
  }

 private:
  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  Origin here() const { return Origin{source_, with_lines_ ? line_ : 0}; }

  void step() {
    if (text_[at_] == '\n') ++line_;
    ++at_;
  }

  [[noreturn]] void fail(const std::string& what) const { fail(here(), what); }
  [[noreturn]] void fail(const Origin& where, const std::string& what) const {
    throw ConfigError(text(where.text(), ": ", path_.empty() ? "" : path_ + ": ", what, "."));
  }

  std::string quoted_here() const {
    if (at_end()) return "end of file";
    return text("'", text_.substr(at_, 1), "'");
  }

  void skip_space() {
    while (!at_end()) {
      if (std::isspace(static_cast<unsigned char>(peek()))) {
        step();
      } else if (text_.compare(at_, 2, "//") == 0) {
        while (!at_end() && peek() != '\n') step();
      } else if (text_.compare(at_, 2, "/*") == 0) {
        const Origin start = here();
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) fail(start, "this /* comment has no end; close it with */");
        while (at_ < end + 2) step();
      } else {
        return;
      }
    }
  }

  JsonValue value(int depth) {
    if (depth > kMaxDepth) fail(text("values nest deeper than ", kMaxDepth, " levels; a run file needs four"));
    if (at_end()) fail("the text ends where a value is expected; complete it");
    if (peek() == '{') return object(depth);
    if (peek() == '[') return array(depth);
    JsonValue v;
    v.origin = here();
    if (peek() == '"') {
      v.kind = JsonValue::Kind::string;
      v.scalar = string();
      return v;
    }
    return word(std::move(v));
  }

  // true, false, null or a number.
  JsonValue word(JsonValue v) {
    const size_t start = at_;
    while (!at_end() && (std::isalnum(static_cast<unsigned char>(peek())) ||
                         std::string_view("+-._").find(peek()) != std::string_view::npos)) {
      step();
    }
    const std::string token = text_.substr(start, at_ - start);
    if (token.empty()) fail(text("unexpected ", quoted_here(), " where a value is expected"));
    v.scalar = nlohmann::json::parse(token, nullptr, /*allow_exceptions=*/false);
    if (v.scalar.is_null()) {
      v.kind = JsonValue::Kind::null;
    } else if (v.scalar.is_boolean()) {
      v.kind = JsonValue::Kind::boolean;
    } else if (v.scalar.is_number()) {
      v.kind = JsonValue::Kind::number;
    } else {
      fail(v.origin, text(token,
                          " is not a JSON value: numbers are written 12 or 1.5e-3 (within a double's range), "
                          "the words are true, false and null, and any other text needs \"quotes\""));
    }
    return v;
  }

  std::string string() {
    const Origin start = here();
    const size_t begin = at_;
    step();
    while (peek() != '"' || at_end()) {
      if (at_end() || peek() == '\n') fail(start, "this string has no closing quote on its line; add one");
      if (peek() == '\\') step();
      if (!at_end()) step();
    }
    step();
    const std::string token = text_.substr(begin, at_ - begin);
    const nlohmann::json parsed = nlohmann::json::parse(token, nullptr, /*allow_exceptions=*/false);
    if (!parsed.is_string()) {
      fail(start, text("the string ", token,
                       " holds an escape, a control character or bytes that JSON does not allow; "
                       "write it in UTF-8 and double each backslash"));
    }
    const std::string s = parsed.get<std::string>();
    check_string(s, text(start.text(), ": ", path_.empty() ? "" : path_ + ": "));
    return s;
  }

  JsonValue object(int depth) {
    JsonValue v;
    v.kind = JsonValue::Kind::object;
    v.origin = here();
    step();
    for (bool first = true;; first = false) {
      skip_space();
      if (first && peek() == '}') break;
      v.members.push_back(member(v, depth));
      if (!more(v.origin, '}', "object")) break;
    }
    step();
    return v;
  }

  JsonMember member(const JsonValue& object, int depth) {
    JsonMember m;
    m.origin = here();
    if (peek() != '"') {
      if (at_end()) fail(object.origin, "this object is not closed; add }");
      fail(text("unexpected ", quoted_here(), " where a \"key\" in double quotes is expected"));
    }
    m.key = string();
    const std::string outer = path_;
    path_ += (path_.empty() ? "" : ".") + m.key;
    if (const JsonMember* before = object.find(m.key)) {
      const std::string line = with_lines_ ? text(" (first in line ", before->origin.line, ")") : "";
      fail(m.origin, text("this key appears twice in one object", line, "; keep one of the two"));
    }
    skip_space();
    if (peek() != ':') fail(text("unexpected ", quoted_here(), " where the ':' after a key is expected"));
    step();
    skip_space();
    m.value = value(depth + 1);
    path_ = outer;
    return m;
  }

  JsonValue array(int depth) {
    JsonValue v;
    v.kind = JsonValue::Kind::array;
    v.origin = here();
    step();
    for (bool first = true;; first = false) {
      skip_space();
      if (first && peek() == ']') break;
      v.items.push_back(value(depth + 1));
      if (!more(v.origin, ']', "list")) break;
    }
    step();
    return v;
  }

  // After an element: true past a ',', false at the closing bracket.
  bool more(const Origin& opened, char close, const char* what) {
    skip_space();
    if (peek() == close) return false;
    if (at_end()) fail(opened, text("this ", what, " is not closed; add ", std::string(1, close)));
    if (peek() != ',') {
      fail(text("unexpected ", quoted_here(), " inside the ", what, " that opens in line ", opened.line,
                "; a comma may be missing before it"));
    }
    const Origin comma = here();
    step();
    skip_space();
    if (peek() == close) fail(comma, text("a comma before the closing ", std::string(1, close), "; remove it"));
    return true;
  }

  const std::string& text_;
  std::shared_ptr<const std::string> source_;
  bool with_lines_;
  size_t at_ = 0;
  int64_t line_ = 1;
  std::string path_;  // of the value being read, for messages
};

nlohmann::ordered_json plain(const JsonValue& v) {
  if (v.kind == JsonValue::Kind::array) {
    auto out = nlohmann::ordered_json::array();
    for (const JsonValue& item : v.items) out.push_back(plain(item));
    return out;
  }
  if (v.kind == JsonValue::Kind::object) {
    auto out = nlohmann::ordered_json::object();
    for (const JsonMember& m : v.members) out[m.key] = plain(m.value);
    return out;
  }
  return nlohmann::ordered_json(v.scalar);
}

}  // namespace

std::string Origin::text() const {
  if (!source) return "run file";
  return line > 0 ? kestrel::text(*source, ":", line) : *source;
}

const JsonMember* JsonValue::find(const std::string& key) const {
  for (const JsonMember& m : members) {
    if (m.key == key) return &m;
  }
  return nullptr;
}

JsonMember* JsonValue::find(const std::string& key) {
  return const_cast<JsonMember*>(static_cast<const JsonValue*>(this)->find(key));
}

std::string JsonValue::brief() const {
  const std::string all = plain(*this).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return all.size() <= kBriefLength ? all : all.substr(0, kBriefLength) + "...";
}

std::string JsonValue::kind_name() const {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return "a boolean";
    case Kind::number:
      return "a number";
    case Kind::string:
      return "a string";
    case Kind::array:
      return "a list";
    case Kind::object:
      return "an object";
  }
  return "";
}

JsonValue read_json(const std::string& text, const std::string& source, bool with_lines) {
  return Reader(text, source, with_lines).document();
}

void check_string(const std::string& s, const std::string& where) {
  const std::string shown = nlohmann::json(s).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  try {
    (void)nlohmann::json(s).dump();
  } catch (const nlohmann::json::type_error&) {
    throw ConfigError(text(where, "the string ", shown, " is not UTF-8; write it in UTF-8, and names of files, too."));
  }
  const auto control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  if (std::any_of(s.begin(), s.end(), control)) {
    throw ConfigError(text(where, "the string ", shown, " holds a control character; leave it out."));
  }
}

void merge_json(JsonValue& base, JsonValue over) {
  if (base.kind != JsonValue::Kind::object || over.kind != JsonValue::Kind::object) {
    base = std::move(over);
    return;
  }
  base.origin = over.origin;
  for (JsonMember& m : over.members) {
    if (JsonMember* mine = base.find(m.key)) {
      mine->origin = m.origin;
      merge_json(mine->value, std::move(m.value));
    } else {
      base.members.push_back(std::move(m));
    }
  }
}

}  // namespace kestrel
