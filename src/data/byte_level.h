// The printable spelling of bytes in vocabulary files (GPT-2's): the visible Latin-1 characters stand for themselves,
// the other 68 bytes for U+0100, U+0101, ... in byte order.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kestrel {

std::string to_byte_level(std::string_view bytes);                  // -> UTF-8
std::optional<std::string> from_byte_level(std::string_view utf8);  // none: a character outside the alphabet

}  // namespace kestrel
