#include <algorithm>
#include <queue>
#include <string>

#include "src/data/tokenizer.h"

namespace kestrel {
namespace {

struct SpecialHit {
  size_t begin = 0;
  const TokenizerParts::Special* special = nullptr;
};

// The first special token in `s` at or after `from`; of those that begin at one place, the longest.
SpecialHit find_special(std::string_view s, size_t from, const std::vector<TokenizerParts::Special>& specials) {
  std::string first_bytes;
  for (const auto& sp : specials) first_bytes += sp.content[0];
  for (size_t at = s.find_first_of(first_bytes, from); at < s.size(); at = s.find_first_of(first_bytes, at + 1)) {
    SpecialHit hit{at};
    for (const auto& sp : specials) {
      const bool longer = !hit.special || sp.content.size() > hit.special->content.size();
      if (longer && s.substr(at).starts_with(sp.content)) hit.special = &sp;
    }
    if (hit.special) return hit;
  }
  return {};
}

}  // namespace

Encoder::Encoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

void Encoder::encode(std::string_view text, std::vector<int32_t>& out, Specials specials) {
  size_t done = 0;
  while (specials == Specials::allow && done < text.size()) {
    const SpecialHit hit = find_special(text, done, tokenizer_->parts_.specials);
    if (!hit.special) break;
    encode_plain(text.substr(done, hit.begin - done), out);
    out.push_back(hit.special->id);
    done = hit.begin + hit.special->content.size();
  }
  encode_plain(text.substr(done), out);
}

void Encoder::encode_plain(std::string_view text, std::vector<int32_t>& out) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = piece_end(tokenizer_->parts_.pattern, text, begin);
    encode_piece(text.substr(begin, end - begin), out);
    begin = end;
  }
}

void Encoder::encode_piece(std::string_view piece, std::vector<int32_t>& out) {
  const bool keep = piece.size() > 1 && piece.size() <= PieceCache::kLongest;
  std::span<const int32_t> ids;
  if (keep && cache_.get(piece, ids)) {
    out.insert(out.end(), ids.begin(), ids.end());
    return;
  }
  if (tokenizer_->parts_.whole_piece_first) {
    if (const auto it = tokenizer_->whole_piece_.find(piece); it != tokenizer_->whole_piece_.end()) {
      out.push_back(it->second);
      return;
    }
  }
  const size_t before = out.size();
  piece.size() <= PieceCache::kLongest ? merge_short(piece, out) : merge_long(piece, out);
  if (keep) cache_.put(piece, std::span(out).subspan(before));
}

// Scans for the best pair after every merge: quadratic, and the fastest for a word.
void Encoder::merge_short(std::string_view piece, std::vector<int32_t>& out) const {
  int32_t ids[PieceCache::kLongest];
  const PairTable::Value* pairs[PieceCache::kLongest];  // the merge of ids[i] and ids[i + 1], or null
  const auto& table = tokenizer_->merges_;
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) ids[i] = tokenizer_->byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = table.find(ids[i], ids[i + 1]);
  while (n > 1) {
    const PairTable::Value* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < n; ++i) {
      if (pairs[i] && (!best || pairs[i]->rank < best->rank)) best = pairs[i], at = i;
    }
    if (!best) break;
    ids[at] = best->merged;
    std::copy(ids + at + 2, ids + n, ids + at + 1);
    if (at + 2 < n) std::copy(pairs + at + 2, pairs + n - 1, pairs + at + 1);
    --n;
    if (at > 0) pairs[at - 1] = table.find(ids[at - 1], ids[at]);
    if (at + 1 < n) pairs[at] = table.find(ids[at], ids[at + 1]);
  }
  out.insert(out.end(), ids, ids + n);
}

// A linked list of symbols and a heap of candidate merges: n log n, for pieces such as a megabyte of base64.
void Encoder::merge_long(std::string_view piece, std::vector<int32_t>& out) const {
  struct Symbol {
    int32_t id;  // -1: merged into its left neighbour
    int64_t previous, next;
  };
  struct Candidate {
    int32_t rank;
    int64_t at;
    int32_t left, right, merged;
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }  // max-heap
  };
  const auto n = static_cast<int64_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  std::priority_queue<Candidate> heap;
  const auto symbol = [&](int64_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto offer = [&](int64_t left) {
    if (left < 0 || symbol(left).next >= n) return;
    const int32_t a = symbol(left).id, b = symbol(symbol(left).next).id;
    if (const auto* v = tokenizer_->merges_.find(a, b)) heap.push({v->rank, left, a, b, v->merged});
  };
  for (int64_t i = 0; i < n; ++i) {
    symbol(i) = {tokenizer_->byte_ids_[static_cast<uint8_t>(piece[static_cast<size_t>(i)])], i - 1, i + 1};
  }
  for (int64_t i = 0; i < n; ++i) offer(i);
  while (!heap.empty()) {
    const Candidate c = heap.top();
    heap.pop();
    Symbol& left = symbol(c.at);
    if (left.id != c.left || left.next >= n || symbol(left.next).id != c.right) continue;  // overtaken
    Symbol& right = symbol(left.next);
    left.id = c.merged;
    right.id = -1;
    left.next = right.next;
    if (left.next < n) symbol(left.next).previous = c.at;
    offer(left.previous);
    offer(c.at);
  }
  for (int64_t i = 0; i < n; i = symbol(i).next) out.push_back(symbol(i).id);
}

}  // namespace kestrel
