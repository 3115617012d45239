#include "src/data/tokenizer.h"

#include <algorithm>

#include "kernels/core/error.h"
#include "src/checkpoint/hash.h"

namespace kestrel {
namespace {

// Ids of all non-special tokens by their bytes; throws on a token that is there twice.
StringMap<int32_t> index_tokens(const TokenizerParts& parts, const std::vector<uint8_t>& special,
                                const std::string& name) {
  StringMap<int32_t> ids;
  ids.reserve(parts.tokens.size());
  for (size_t i = 0; i < parts.tokens.size(); ++i) {
    if (special[i]) continue;
    const auto [it, fresh] = ids.emplace(parts.tokens[i], static_cast<int32_t>(i));
    if (!fresh) {
      throw DataError(text(name, ": ids ", it->second, " and ", i,
                           " stand for the same bytes. A vocabulary has each token once; the file is damaged."));
    }
  }
  return ids;
}

std::string fingerprint_of(const TokenizerParts& parts) {
  Xxh64 h;
  const auto add_number = [&h](uint64_t n) { h.update(&n, sizeof n); };
  const auto add_bytes = [&](std::string_view s) {
    add_number(s.size());
    h.update(s.data(), s.size());
  };
  add_bytes(regex_of(parts.pattern));
  add_number(parts.whole_piece_first);
  for (const auto& t : parts.tokens) add_bytes(t);
  for (const auto& m : parts.merges) add_number(static_cast<uint64_t>(m.left) << 32 | static_cast<uint32_t>(m.right));
  for (const auto& s : parts.specials) add_number(static_cast<uint64_t>(s.id));
  return hex(h.digest());
}

}  // namespace

Tokenizer::Tokenizer(TokenizerParts parts, const std::string& name)
    : parts_(std::move(parts)), merges_(static_cast<int64_t>(parts_.merges.size())), byte_ids_(256, -1) {
  const auto vocab = vocab_size();
  special_.assign(parts_.tokens.size(), 0);
  std::sort(parts_.specials.begin(), parts_.specials.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  for (const auto& s : parts_.specials) {
    if (s.content.empty() || s.id < 0 || s.id >= vocab || special_[static_cast<size_t>(s.id)] ||
        parts_.tokens[static_cast<size_t>(s.id)] != s.content) {
      throw DataError(text(name, ": special token \"", s.content, "\" has id ", s.id, ", which is outside the ", vocab,
                           " ids, taken, or another token's. Give it an id of its own."));
    }
    special_[static_cast<size_t>(s.id)] = 1;
  }
  StringMap<int32_t> ids = index_tokens(parts_, special_, name);
  for (int b = 0; b < 256; ++b) {
    const auto it = ids.find(std::string(1, static_cast<char>(b)));
    if (it == ids.end()) {
      throw DataError(text(name, ": no token stands for the single byte ", b,
                           ". A byte-level vocabulary has all 256, so that any text can be encoded."));
    }
    byte_ids_[static_cast<size_t>(b)] = it->second;
  }
  for (size_t r = 0; r < parts_.merges.size(); ++r) {
    const auto& m = parts_.merges[r];
    const auto usable = [&](int32_t id) { return id >= 0 && id < vocab && !special_[static_cast<size_t>(id)]; };
    if (!usable(m.left) || !usable(m.right) || !usable(m.merged) ||
        bytes_of(m.left) + bytes_of(m.right) != bytes_of(m.merged)) {
      throw DataError(text(name, ": merge ", r, " joins ids ", m.left, " and ", m.right, " to ", m.merged,
                           ", which is not their concatenation in the vocabulary of ", vocab,
                           ". The file is damaged."));
    }
    if (!merges_.insert(m.left, m.right, {static_cast<int32_t>(r), m.merged})) {
      throw DataError(text(name, ": merge ", r, " repeats an earlier one (ids ", m.left, " and ", m.right,
                           "). The file is damaged."));
    }
  }
  fingerprint_ = fingerprint_of(parts_);
  if (parts_.whole_piece_first) whole_piece_ = std::move(ids);
}

std::vector<int32_t> Tokenizer::encode(std::string_view s, Specials specials) const {
  std::vector<int32_t> out;
  Encoder(*this).encode(s, out, specials);
  return out;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string out;
  for (int32_t id : ids) out += bytes_of(id);
  return out;
}

std::optional<int32_t> Tokenizer::id_of(std::string_view special) const {
  for (const auto& s : parts_.specials) {
    if (s.content == special) return s.id;
  }
  return std::nullopt;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[static_cast<size_t>(id)] != 0;
}

const std::string& Tokenizer::bytes_of(int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw DataError(text("token id ", id, " is outside the tokenizer's vocabulary of ", vocab_size(), " (ids 0 to ",
                         vocab_size() - 1, "). Decode with the tokenizer that made the ids."));
  }
  return parts_.tokens[static_cast<size_t>(id)];
}

std::vector<int32_t> Tokenizer::token_bytes() const {
  std::vector<int32_t> n(parts_.tokens.size());
  for (size_t i = 0; i < n.size(); ++i) n[i] = special_[i] ? 0 : static_cast<int32_t>(parts_.tokens[i].size());
  return n;
}

void check_same_tokenizer(const std::string& what, const std::string& made_with, const std::string& other,
                          const std::string& fingerprint) {
  if (made_with.empty() || fingerprint.empty() || made_with == fingerprint) return;
  throw DataError(text(what, " was made with the tokenizer of fingerprint ", made_with, ", but ", other, " is ",
                       fingerprint,
                       ": the same ids are other text. Name the tokenizer that made it, or make the data "
                       "again with `kestrel data build`."));
}

}  // namespace kestrel
