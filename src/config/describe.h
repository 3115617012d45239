// The field table (fields.h) as text for people and editors.
#pragma once

#include <string>

namespace kestrel {

// JSON schema (draft 7) of a run file.  It knows types, ranges and names; what needs several fields is checked by
// load_run_config alone, and `base` may supply any field, so nothing is marked as required.
std::string config_schema();

// The reference page, Markdown: one table for each section.
std::string config_reference();

// One field or a whole section, by its path ("model.balancing.gain", "model.balancing") or by the end of it ("gain").
// ConfigError with the nearest path when there is none.
std::string explain_field(const std::string& path);

}  // namespace kestrel
