#include "src/data/pretokenizer.h"

#include <algorithm>
#include <array>

#include "src/data/unicode_class.h"

namespace kestrel {
namespace {

constexpr std::string_view kCl100k = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
                                     R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Char {
  CharClass cls;
  uint8_t bytes;
};

constexpr std::array<CharClass, 128> make_ascii() {
  std::array<CharClass, 128> t{};
  for (size_t c = 0; c < 128; ++c) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) t[c] = CharClass::letter;
    if (c >= '0' && c <= '9') t[c] = CharClass::number;
    if ((c >= 9 && c <= 13) || c == ' ') t[c] = CharClass::space;
  }
  return t;
}
constexpr auto kAscii = make_ascii();

uint8_t byte_at(std::string_view s, size_t i) {
  return static_cast<uint8_t>(s[i]);
}
bool is_newline(char c) {
  return c == '\r' || c == '\n';
}

// A multi-byte character, or one invalid byte (overlong forms, surrogates and values past U+10FFFF are invalid).
Char decode_wide(std::string_view s, size_t i) {
  constexpr Char kInvalid{CharClass::other, 1};
  const uint8_t lead = byte_at(s, i);
  const uint8_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || s.size() - i < n) return kInvalid;
  uint32_t c = lead & (0x7fu >> n);
  for (size_t k = 1; k < n; ++k) {
    const uint8_t b = byte_at(s, i + k);
    if ((b & 0xc0) != 0x80) return kInvalid;
    c = c << 6 | (b & 0x3fu);
  }
  const bool overlong = (n == 3 && c < 0x800) || (n == 4 && c < 0x10000);
  if (overlong || (c >= 0xd800 && c < 0xe000) || c >= 0x110000) return kInvalid;
  return {class_of(c), n};
}

Char char_at(std::string_view s, size_t i) {
  const uint8_t b = byte_at(s, i);
  return b < 128 ? Char{kAscii[b], 1} : decode_wide(s, i);
}

// End of the longest run of class `cls` from i; at most `limit` characters.
size_t run_end(std::string_view s, size_t i, CharClass cls, size_t limit = ~size_t{0}) {
  for (size_t n = 0; i < s.size() && n < limit; ++n) {
    const Char c = char_at(s, i);
    if (c.cls != cls) break;
    i += c.bytes;
  }
  return i;
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
}

// End of a contraction that begins at the apostrophe at i, or i.  Ignoring case also folds U+017F (long s) to s.
size_t contraction_end(std::string_view s, size_t i, bool ignore_case) {
  const auto at = [&](size_t k) { return k >= s.size() ? '\0' : ignore_case ? lower(s[k]) : s[k]; };
  const char a = at(i + 1), b = at(i + 2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
  if (ignore_case && s.substr(i + 1, 2) == "\xc5\xbf") return i + 3;
  return i;
}

// \s+(?!\S)|\s+ : a run of spaces leaves its last character to the piece that follows it, if any.
size_t spaces_end(std::string_view s, size_t begin) {
  size_t end = begin, last = begin;
  while (end < s.size()) {
    const Char c = char_at(s, end);
    if (c.cls != CharClass::space) return last > begin ? last : end;
    last = end;
    end += c.bytes;
  }
  return end;
}

// \s*[\r\n]+ : through the last line break of the run of spaces; `begin` if it has none.
size_t line_breaks_end(std::string_view s, size_t begin) {
  size_t found = begin;
  for (size_t i = begin; i < s.size();) {
    const Char c = char_at(s, i);
    if (c.cls != CharClass::space) break;
    if (is_newline(s[i])) found = i + 1;
    i += c.bytes;
  }
  return found;
}

size_t cl100k_end(std::string_view s, size_t begin) {
  if (s[begin] == '\'') {
    if (const size_t end = contraction_end(s, begin, true); end > begin) return end;
  }
  const Char first = char_at(s, begin);
  const size_t next = begin + first.bytes;
  if (first.cls == CharClass::letter) return run_end(s, next, CharClass::letter);
  if (first.cls == CharClass::number) return run_end(s, begin, CharClass::number, 3);
  if (!is_newline(s[begin])) {
    if (const size_t end = run_end(s, next, CharClass::letter); end > next) return end;
  }
  const size_t others = s[begin] == ' ' ? next : begin;
  if (size_t end = run_end(s, others, CharClass::other); end > others) {
    while (end < s.size() && is_newline(s[end])) ++end;
    return end;
  }
  if (const size_t end = line_breaks_end(s, begin); end > begin) return end;
  return spaces_end(s, begin);
}

size_t gpt2_end(std::string_view s, size_t begin) {
  if (s[begin] == '\'') {
    if (const size_t end = contraction_end(s, begin, false); end > begin) return end;
  }
  const size_t start = s[begin] == ' ' ? begin + 1 : begin;
  if (start < s.size()) {
    const Char c = char_at(s, start);
    if (c.cls != CharClass::space) return run_end(s, start + c.bytes, c.cls);
  }
  return spaces_end(s, begin);
}

bool visible_ascii(char c) {
  return c > ' ' && c < 127;
}
bool alphanumeric_ascii(char c) {
  return (c >= '0' && c <= '9') || (lower(c) >= 'a' && lower(c) <= 'z');
}

}  // namespace

std::string_view regex_of(SplitPattern pattern) {
  return pattern == SplitPattern::cl100k ? kCl100k : kGpt2;
}

std::string_view name_of(SplitPattern pattern) {
  return pattern == SplitPattern::cl100k ? "cl100k" : "gpt2";
}

std::optional<SplitPattern> pattern_from_regex(std::string_view regex) {
  for (auto p : {SplitPattern::cl100k, SplitPattern::gpt2}) {
    if (regex == regex_of(p)) return p;
  }
  return std::nullopt;
}

std::optional<SplitPattern> pattern_from_name(std::string_view name) {
  for (auto p : {SplitPattern::cl100k, SplitPattern::gpt2}) {
    if (name == name_of(p)) return p;
  }
  return std::nullopt;
}

size_t piece_end(SplitPattern pattern, std::string_view text, size_t begin) {
  return pattern == SplitPattern::cl100k ? cl100k_end(text, begin) : gpt2_end(text, begin);
}

size_t safe_cut(std::string_view text, size_t at) {
  for (size_t i = std::max<size_t>(at, 2); i < text.size(); ++i) {
    if (text[i - 1] == '\n' && visible_ascii(text[i - 2]) && alphanumeric_ascii(text[i])) return i;
  }
  return text.size();
}

}  // namespace kestrel
