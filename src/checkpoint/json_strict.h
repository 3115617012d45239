// JSON of files we did not just write ourselves: the library's parser silently keeps the last of two equal keys.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kestrel {

// Parses `content`; DataError naming `what` (a path, mostly) when it is not JSON or an object has a key twice.
nlohmann::json parse_json_strict(std::string_view content, const std::string& what);

}  // namespace kestrel
