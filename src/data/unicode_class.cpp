#include "src/data/unicode_class.h"

#include <algorithm>
#include <vector>

namespace kestrel {
namespace {

std::vector<CharClass> make_table() {
  constexpr CodePointRange kSpaces[] = {{0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
                                        {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                        {0x205f, 0x205f}, {0x3000, 0x3000}};
  std::vector<CharClass> table(0x110000, CharClass::other);
  const auto fill = [&](std::span<const CodePointRange> ranges, CharClass value) {
    for (const auto& r : ranges) std::fill(table.begin() + r.first, table.begin() + r.last + 1, value);
  };
  fill(letter_ranges(), CharClass::letter);
  fill(number_ranges(), CharClass::number);
  fill(kSpaces, CharClass::space);
  return table;
}

}  // namespace

CharClass class_of(uint32_t code_point) {
  static const std::vector<CharClass> table = make_table();  // 1.1 MB, made once in under a millisecond
  return table[code_point];
}

}  // namespace kestrel
