#include "src/data/text_pieces.h"

#include "src/data/pretokenizer.h"

namespace kestrel {

std::vector<TextPiece> cut_documents(std::span<const std::string> documents) {
  constexpr size_t kPiece = size_t{256} << 10;
  std::vector<TextPiece> pieces;
  for (size_t d = 0; d < documents.size(); ++d) {
    std::string_view rest = documents[d];
    while (rest.size() > kPiece) {
      const size_t cut = safe_cut(rest, kPiece);
      pieces.push_back({rest.substr(0, cut), d});
      rest.remove_prefix(cut);
    }
    if (!rest.empty() || pieces.empty() || pieces.back().document != d) pieces.push_back({rest, d});
  }
  return pieces;
}

}  // namespace kestrel
