#include "src/data/byte_level.h"

#include <array>
#include <cstdint>

namespace kestrel {
namespace {

struct Alphabet {
  std::array<uint16_t, 256> code_point{};
  std::array<int16_t, 324> byte{};  // by code point; -1: none.  256 + 68 = 324

  Alphabet() {
    byte.fill(-1);
    uint16_t extra = 256;
    for (unsigned b = 0; b < 256; ++b) {
      const bool visible = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      code_point[b] = visible ? static_cast<uint16_t>(b) : extra++;
      byte[code_point[b]] = static_cast<int16_t>(b);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet a;
  return a;
}

}  // namespace

std::string to_byte_level(std::string_view bytes) {
  std::string out;
  for (char c : bytes) {
    const uint16_t cp = alphabet().code_point[static_cast<uint8_t>(c)];
    if (cp < 128) {
      out += static_cast<char>(cp);
    } else {  // at most U+0143: two bytes
      out += static_cast<char>(0xc0 | cp >> 6);
      out += static_cast<char>(0x80 | (cp & 63));
    }
  }
  return out;
}

std::optional<std::string> from_byte_level(std::string_view utf8) {
  std::string out;
  for (size_t i = 0; i < utf8.size(); ++i) {
    unsigned cp = static_cast<uint8_t>(utf8[i]);
    if (cp >= 128) {
      if (cp < 0xc2 || cp > 0xdf || i + 1 >= utf8.size()) return std::nullopt;
      cp = (cp & 31) << 6 | (static_cast<uint8_t>(utf8[++i]) & 63u);
    }
    if (cp >= alphabet().byte.size() || alphabet().byte[cp] < 0) return std::nullopt;
    out += static_cast<char>(alphabet().byte[cp]);
  }
  return out;
}

}  // namespace kestrel
