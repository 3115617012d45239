// Byte-level BPE: text <-> token ids.
//
// Text is cut into pieces by a pretokenizer (pretokenizer.h); each piece starts as single bytes, and the adjacent pair
// with the lowest merge rank is merged, leftmost first, until none is left (Sennrich et al. 2016; bytes as in GPT-2).
// Any byte string encodes, and decode(encode(x)) == x.
//
// Special tokens (say <|endoftext|>) are ids of their own.  Plain text never yields them: "<|endoftext|>" typed in a
// document is encoded as its characters, unless the caller passes Specials::allow.
//
// File: Hugging Face's tokenizer.json (model BPE, pre_tokenizer ByteLevel or Split + ByteLevel, decoder ByteLevel), so
// `tokenizers` and `transformers` load what we save.  Loading is strict: a normalizer, an unknown pattern, dropout, a
// hole in the ids or a merge without its token throws DataError rather than encoding differently.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/data/pair_table.h"
#include "src/data/piece_cache.h"
#include "src/data/pretokenizer.h"
#include "src/data/string_map.h"

namespace kestrel {

inline constexpr std::string_view kEndOfText = "<|endoftext|>";

enum class Specials : uint8_t { as_text, allow };

struct TokenizerParts {
  struct Merge {
    int32_t left, right, merged;
  };
  struct Special {
    int32_t id;
    std::string content;
  };
  SplitPattern pattern = SplitPattern::cl100k;
  bool whole_piece_first = false;   // a piece that is a token is taken as it is ("ignore_merges")
  std::vector<std::string> tokens;  // [vocab] bytes of each id; a special's is its content
  std::vector<Merge> merges;        // by rank
  std::vector<Special> specials;
};

class Tokenizer {
 public:
  // Checks the parts (all 256 bytes present, ids dense and distinct, merges consistent); DataError with `name` if not.
  explicit Tokenizer(TokenizerParts parts, const std::string& name = "tokenizer");
  static Tokenizer load(const std::string& path);
  // Under a temporary name, then renamed.
  void save(const std::string& path) const;

  std::vector<int32_t> encode(std::string_view text, Specials specials = Specials::as_text) const;
  // DataError on an id outside the vocabulary.  Special tokens decode to their content.
  std::string decode(std::span<const int32_t> ids) const;

  int64_t vocab_size() const { return static_cast<int64_t>(parts_.tokens.size()); }
  std::optional<int32_t> id_of(std::string_view special) const;  // special tokens only
  bool is_special(int32_t id) const;
  const std::string& bytes_of(int32_t id) const;  // DataError outside the vocabulary
  // [vocab] bytes of text per token; special tokens 0.
  std::vector<int32_t> token_bytes() const;
  // 16 hex digits over everything that decides how text is encoded.
  const std::string& fingerprint() const { return fingerprint_; }
  const TokenizerParts& parts() const { return parts_; }

 private:
  friend class Encoder;
  TokenizerParts parts_;
  std::string fingerprint_;
  PairTable merges_;                // (left, right) -> rank and merged id
  std::vector<int32_t> byte_ids_;   // [256]
  StringMap<int32_t> whole_piece_;  // bytes -> id, filled when whole_piece_first
  std::vector<uint8_t> special_;    // [vocab]
};

// DataError, naming both, when two fingerprints are known ("": not) and differ.  `what` was made with the tokenizer
// `made_with`, and is used with `other`, a description, of the fingerprint `fingerprint`.
void check_same_tokenizer(const std::string& what, const std::string& made_with, const std::string& other,
                          const std::string& fingerprint);

// Encodes much text with one tokenizer: remembers pieces it has seen.  One per thread; the tokenizer must outlive it.
class Encoder {
 public:
  explicit Encoder(const Tokenizer& tokenizer);
  // Appends to `out`.
  void encode(std::string_view text, std::vector<int32_t>& out, Specials specials = Specials::as_text);

 private:
  void encode_plain(std::string_view text, std::vector<int32_t>& out);
  void encode_piece(std::string_view piece, std::vector<int32_t>& out);
  void merge_short(std::string_view piece, std::vector<int32_t>& out) const;
  void merge_long(std::string_view piece, std::vector<int32_t>& out) const;

  const Tokenizer* tokenizer_;
  PieceCache cache_;
};

}  // namespace kestrel
