// A hash map keyed by byte strings that is looked up by string_view without making a string.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "src/data/hash.h"

namespace kestrel {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return hash_bytes(s.data(), s.size()); }
};

template <class V>
using StringMap = std::unordered_map<std::string, V, StringHash, std::equal_to<>>;

}  // namespace kestrel
