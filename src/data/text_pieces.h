// Documents cut for threads: stretches of text that can be pretokenized on their own.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kestrel {

struct TextPiece {
  std::string_view text;  // into the document
  size_t document;
};

// In order; every document has at least one piece (maybe empty), long ones several of about 256 KiB (see safe_cut).
// Where they are cut depends on the documents alone.
std::vector<TextPiece> cut_documents(std::span<const std::string> documents);

}  // namespace kestrel
