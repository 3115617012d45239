// Cuts text into the pieces that BPE then merges within.
//
// Each pattern is the hand-written equal of a regular expression that Hugging Face's `tokenizers` runs when it loads
// our tokenizer.json; they agree on every Unicode string (letters, numbers and spaces as of Unicode 16.0, see
// unicode_class.h).  A byte that is part of no valid UTF-8 sequence counts as one character that is neither letter,
// number nor space.
//
//   cl100k  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
//           \s+(?!\S)|\s+          (GPT-4's, Llama 3's; our default)
//   gpt2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kestrel {

enum class SplitPattern : uint8_t { cl100k, gpt2 };

std::string_view regex_of(SplitPattern pattern);
std::string_view name_of(SplitPattern pattern);
std::optional<SplitPattern> pattern_from_regex(std::string_view regex);
std::optional<SplitPattern> pattern_from_name(std::string_view name);

// End of the piece that begins at `begin` < text.size(); pieces are never empty and cover the text.
size_t piece_end(SplitPattern pattern, std::string_view text, size_t begin);

// The first position >= `at` where the text can be cut in two without changing its pieces (text.size() if none): after
// a line that ends in a visible ASCII character, before one that begins with a letter or digit of ASCII.
size_t safe_cut(std::string_view text, size_t at);

}  // namespace kestrel
