#include "src/data/bpe_train.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <set>

#include "kernels/core/error.h"
#include "kernels/core/parallel.h"
#include "src/data/byte_level.h"
#include "src/data/text_pieces.h"

namespace kestrel {
namespace {

struct Pair {
  int32_t left, right;
  uint64_t key() const { return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right); }
};

struct Word {
  std::vector<int32_t> symbols;
  int64_t count;
};

// Occurrences of a pair, and the words that had it at some time (repeats and stale entries included).
struct PairState {
  int64_t count = 0;
  std::vector<int32_t> words;
};

struct Ranked {
  int64_t count;
  Pair pair;
  bool operator<(const Ranked& o) const {  // the top of a priority queue is the largest
    return count != o.count ? count < o.count : pair.key() > o.pair.key();
  }
};

struct MixHash {
  size_t operator()(uint64_t k) const { return mix64(k); }
};

class Merger {
 public:
  explicit Merger(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t w = 0; w < words_.size(); ++w) {
      const auto& s = words_[w].symbols;
      for (size_t i = 0; i + 1 < s.size(); ++i) change({s[i], s[i + 1]}, words_[w].count, static_cast<int32_t>(w));
    }
    for (const auto& [key, state] : pairs_) heap_.push({state.count, pair_of(key)});
    grown_.clear();
  }

  // The most frequent pair of at least min_count occurrences.
  bool best(int64_t min_count, Pair& out) {
    while (!heap_.empty()) {
      const Ranked top = heap_.top();
      heap_.pop();
      const int64_t now = pairs_[top.pair.key()].count;
      if (now < top.count && now > 0) heap_.push({now, top.pair});  // it shrank since
      if (now != top.count || now == 0) continue;                   // stale: a later entry stands for it
      if (now < min_count) return false;
      out = top.pair;
      return true;
    }
    return false;
  }

  void merge(Pair pair, int32_t merged) {
    std::vector<int32_t> touched = std::move(pairs_[pair.key()].words);
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (int32_t w : touched) merge_in_word(w, pair, merged);
    pairs_[pair.key()] = {};
    for (uint64_t key : grown_) heap_.push({pairs_[key].count, pair_of(key)});
    grown_.clear();
  }

 private:
  static Pair pair_of(uint64_t key) { return {static_cast<int32_t>(key >> 32), static_cast<int32_t>(key)}; }

  void change(Pair pair, int64_t by, int32_t word) {
    PairState& state = pairs_[pair.key()];
    state.count += by;
    if (by > 0) {
      if (state.words.empty() || state.words.back() != word) state.words.push_back(word);
      grown_.insert(pair.key());
    }
  }

  void merge_in_word(int32_t w, Pair pair, int32_t merged) {
    auto& s = words_[static_cast<size_t>(w)].symbols;
    const int64_t count = words_[static_cast<size_t>(w)].count;
    size_t to = 0;
    for (size_t i = 0; i < s.size();) {
      if (i + 1 >= s.size() || s[i] != pair.left || s[i + 1] != pair.right) {
        s[to++] = s[i++];
        continue;
      }
      if (to > 0) {
        change({s[to - 1], pair.left}, -count, w);
        change({s[to - 1], merged}, count, w);
      }
      if (i + 2 < s.size()) {
        change({pair.right, s[i + 2]}, -count, w);
        change({merged, s[i + 2]}, count, w);
      }
      s[to++] = merged;
      i += 2;
    }
    s.resize(to);
  }

  std::vector<Word> words_;
  std::unordered_map<uint64_t, PairState, MixHash> pairs_;
  std::set<uint64_t> grown_;  // pairs whose count rose since the heap last heard of them; ordered: pushes are too
  std::priority_queue<Ranked> heap_;
};

bool is_utf8(const std::string& s) {
  try {
    nlohmann::json(s).dump();  // refuses anything else
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

void check(const BpeOptions& o) {
  const int64_t least = 256 + static_cast<int64_t>(o.specials.size());
  if (o.vocab_size < least || o.vocab_size > kMaxVocabSize) {
    throw ConfigError(text("vocab size ", o.vocab_size, " is outside ", least, " to ", kMaxVocabSize,
                           " (256 bytes and ", o.specials.size(), " special tokens are always in it)"));
  }
  if (o.min_count < 1) throw ConfigError(text("min count ", o.min_count, " is below 1"));
  for (size_t i = 0; i < o.specials.size(); ++i) {
    const auto& s = o.specials[i];
    if (s.empty() || std::count(o.specials.begin(), o.specials.end(), s) > 1) {
      throw ConfigError(
          text("special token ", i + 1, " (\"", s, "\") is empty or given twice. Give each one a name of its own."));
    }
    if (!is_utf8(s)) {
      throw ConfigError(text("special token ", i + 1, " (\"", s,
                             "\") is not valid UTF-8, which tokenizer.json is written in. Spell it in UTF-8."));
    }
  }
}

}  // namespace

BpeTrainer::BpeTrainer(BpeOptions options) : options_(std::move(options)) {
  check(options_);
}

void BpeTrainer::add(std::span<const std::string> documents) {
  const std::vector<TextPiece> pieces = cut_documents(documents);
  std::vector<StringMap<int64_t>> found(static_cast<size_t>(omp_get_max_threads()));
  parallel_for_dynamic(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
    auto& counts = found[static_cast<size_t>(omp_get_thread_num())];
    const std::string_view s = pieces[static_cast<size_t>(p)].text;
    for (size_t begin = 0; begin < s.size();) {
      const size_t end = piece_end(options_.pattern, s, begin);
      const auto piece = s.substr(begin, end - begin);
      const auto it = counts.find(piece);
      if (it == counts.end()) {
        counts.emplace(piece, 1);
      } else {
        ++it->second;
      }
      begin = end;
    }
  });
  for (const auto& counts : found) {  // sums: the order does not matter
    for (const auto& [piece, n] : counts) counts_[piece] += n;
  }
}

Tokenizer BpeTrainer::train() const {
  if (counts_.empty()) {
    throw DataError(
        "no text to train a tokenizer on: every document is empty. Check that the inputs are the files you mean and, "
        "for JSON lines, that --key names the text.");
  }
  std::vector<std::pair<std::string_view, int64_t>> sorted(counts_.begin(), counts_.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Word> words;
  for (const auto& [piece, n] : sorted) {
    Word w{{}, n};
    for (char c : piece) w.symbols.push_back(static_cast<uint8_t>(c));
    words.push_back(std::move(w));
  }
  TokenizerParts parts;
  parts.pattern = options_.pattern;
  StringMap<int32_t> ids;
  const auto token = [&](const std::string& bytes) {
    const auto [it, fresh] = ids.emplace(bytes, static_cast<int32_t>(parts.tokens.size()));
    if (fresh) parts.tokens.push_back(bytes);
    return it->second;
  };
  for (int b = 0; b < 256; ++b) token(std::string(1, static_cast<char>(b)));
  const auto full = static_cast<size_t>(options_.vocab_size) - options_.specials.size();
  Merger merger(std::move(words));
  Pair pair{};
  while (parts.tokens.size() < full && merger.best(options_.min_count, pair)) {
    // Two merges may spell one token ("a"+"bc", "ab"+"c"): it keeps its id, and both merges stay.
    const int32_t merged =
        token(parts.tokens[static_cast<size_t>(pair.left)] + parts.tokens[static_cast<size_t>(pair.right)]);
    merger.merge(pair, merged);
    parts.merges.push_back({pair.left, pair.right, merged});
  }
  for (const auto& s : options_.specials) {
    const auto spelled_like_it = from_byte_level(s);
    if (spelled_like_it && ids.contains(*spelled_like_it)) {
      throw ConfigError(text("special token \"", s,
                             "\" is also a token of plain text, and tokenizer.json could not tell "
                             "the two apart. Give it a name that text does not have, such as <|",
                             s, "|>."));
    }
    parts.specials.push_back({static_cast<int32_t>(parts.tokens.size()), s});
    parts.tokens.push_back(s);
  }
  return Tokenizer(std::move(parts), "the trained tokenizer");
}

}  // namespace kestrel
