#include "src/checkpoint/json_strict.h"

#include <unordered_set>
#include <vector>

#include "kernels/core/error.h"

namespace kestrel {

using nlohmann::json;

json parse_json_strict(std::string_view content, const std::string& what) {
  std::vector<std::unordered_set<std::string>> open_objects;
  std::string twice;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second && twice.empty()) twice = key;
    }
    return true;
  };
  json j;
  try {
    j = json::parse(content.begin(), content.end(), watch);
  } catch (const json::exception& e) {
    throw DataError(text(what, " is not JSON: ", e.what(), ". The file is damaged or of another kind."));
  }
  if (!twice.empty()) {
    throw DataError(text(what, " has the key \"", twice, "\" twice in one object. The file is damaged."));
  }
  return j;
}

}  // namespace kestrel
