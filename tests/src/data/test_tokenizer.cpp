#include "src/data/tokenizer.h"

#include <omp.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "kernels/core/error.h"
#include "src/data/bpe_train.h"
#include "tests/src/data/scratch_folder.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using nlohmann::json;
using test::message_of;
using test::ScratchFolder;

std::string excerpt() {
  return ScratchFolder::read(std::string(KESTREL_FIXTURES) + "/text/kjv_excerpt.txt");
}

Tokenizer train(std::vector<std::string> documents, BpeOptions options) {
  BpeTrainer trainer(std::move(options));
  trainer.add(documents);
  return trainer.train();
}

// Trained once for all tests that only read it.
const Tokenizer& bible() {
  static const Tokenizer t =
      train({excerpt()}, {.vocab_size = 1000, .specials = {"<|endoftext|>", "<|end|>", "<|endo|>"}});
  return t;
}

std::string random_bytes(std::mt19937& rng, size_t n) {
  std::string s(n, '\0');
  for (auto& c : s) c = static_cast<char>(rng());
  return s;
}

// The definition, step by step: among all adjacent pairs the lowest rank, leftmost first.
std::vector<int32_t> naive_merge(const Tokenizer& t, std::string_view piece) {
  std::vector<int32_t> ids;
  for (char c : piece) ids.push_back(static_cast<uint8_t>(c));  // trained ids of bytes are the bytes
  for (;;) {
    size_t best_rank = std::numeric_limits<size_t>::max(), at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (size_t r = 0; r < t.parts().merges.size() && r < best_rank; ++r) {
        const auto& m = t.parts().merges[r];
        if (m.left == ids[i] && m.right == ids[i + 1]) best_rank = r, at = i;
      }
    }
    if (best_rank == std::numeric_limits<size_t>::max()) return ids;
    ids[at] = t.parts().merges[best_rank].merged;
    ids.erase(ids.begin() + static_cast<int64_t>(at) + 1);
  }
}

TEST(Tokenizer, AnyBytesRoundTrip) {
  std::mt19937 rng(1);
  for (size_t n : {0, 1, 2, 3, 17, 63, 64, 65, 1000, 20000}) {
    const std::string s = random_bytes(rng, n);
    EXPECT_EQ(bible().decode(bible().encode(s)), s) << n;
  }
  const std::string text = excerpt();
  const auto ids = bible().encode(text);
  EXPECT_EQ(bible().decode(ids), text);
  EXPECT_LT(ids.size() * 2, text.size());  // and it compresses: more than 2 bytes a token
}

TEST(Tokenizer, MergesByRankLeftmostFirst) {
  std::mt19937 rng(2);
  const std::string text = excerpt();
  for (int trial = 0; trial < 40; ++trial) {
    // Letters only, so that the whole is one piece: some shorter than the cache's limit of 64, some longer.
    std::string s;
    for (size_t i = rng() % 200000, n = 1 + rng() % 120; s.size() < n; ++i) {
      if (std::isalpha(static_cast<unsigned char>(text[i]))) s += text[i];
    }
    EXPECT_EQ(bible().encode(s), naive_merge(bible(), s)) << s;
  }
}

TEST(Tokenizer, LongPiecesTakeNLogN) {
  // A megabyte without a border: a quadratic merge would take hours.
  EXPECT_EQ(bible().decode(bible().encode(std::string(1 << 20, 'a'))).size(), size_t{1} << 20);
}

TEST(Tokenizer, CacheChangesNothing) {
  std::mt19937 rng(3);
  Encoder warm(bible());
  for (int i = 0; i < 200; ++i) {  // enough distinct pieces to empty the cache a few times
    std::string s;
    for (int k = 0; k < 500; ++k)
      s += " " + std::to_string(rng()) + std::string(1 + rng() % 3, static_cast<char>('a' + rng() % 26));
    std::vector<int32_t> ids;
    warm.encode(s, ids);
    ASSERT_EQ(ids, bible().encode(s));
  }
}

TEST(Tokenizer, SpecialTokensOnlyWhenAllowed) {
  const auto& t = bible();
  const int32_t eot = *t.id_of("<|endoftext|>"), endo = *t.id_of("<|endo|>");
  EXPECT_EQ(eot, t.vocab_size() - 3);
  const std::string s = "a<|endoftext|><|endo|>b<|endo";
  const auto plain = t.encode(s);
  for (int32_t id : plain) EXPECT_FALSE(t.is_special(id));
  EXPECT_EQ(t.decode(plain), s);
  auto expected = t.encode("a");
  expected.insert(expected.end(), {eot, endo});
  for (int32_t id : t.encode("b<|endo")) expected.push_back(id);
  EXPECT_EQ(t.encode(s, Specials::allow), expected);
  EXPECT_EQ(t.decode(expected), s);
  EXPECT_TRUE(t.is_special(eot));
  EXPECT_FALSE(t.is_special(-1));
  EXPECT_FALSE(t.id_of("In").has_value());
}

TEST(Tokenizer, OfOverlappingSpecialsTheLongestWins) {
  const Tokenizer t = train({"aaaa"}, {.vocab_size = 300, .specials = {"<x>", "<x><y>"}});
  EXPECT_EQ(t.encode("<x><y>", Specials::allow), (std::vector<int32_t>{*t.id_of("<x><y>")}));
  EXPECT_EQ(t.encode("<x><x><y>", Specials::allow), (std::vector<int32_t>{*t.id_of("<x>"), *t.id_of("<x><y>")}));
}

TEST(Tokenizer, BytesOfTokensAddUpToTheText) {
  const std::string s = "And God said, <|endoftext|> caf\u00e9";
  const auto n = bible().token_bytes();
  int64_t sum = 0;
  for (int32_t id : bible().encode(s)) sum += n[static_cast<size_t>(id)];
  EXPECT_EQ(sum, static_cast<int64_t>(s.size()));
  EXPECT_EQ(n[static_cast<size_t>(*bible().id_of("<|endoftext|>"))], 0);
}

TEST(Tokenizer, DecodeRefusesForeignIds) {
  EXPECT_CONTAINS(message_of<DataError>([] { (void)bible().decode(std::vector<int32_t>{5, 1000}); }), "1000");
  EXPECT_CONTAINS(message_of<DataError>([] { (void)bible().decode(std::vector<int32_t>{-1}); }), "-1");
}

TEST(Tokenizer, SavedFileLoadsAsTheSameTokenizer) {
  const ScratchFolder dir;
  for (auto pattern : {SplitPattern::cl100k, SplitPattern::gpt2}) {
    const Tokenizer t = train({excerpt()}, {.vocab_size = 400, .pattern = pattern});
    t.save(dir / "t.json");
    const Tokenizer u = Tokenizer::load(dir / "t.json");
    EXPECT_EQ(u.fingerprint(), t.fingerprint());
    EXPECT_EQ(u.vocab_size(), t.vocab_size());
    EXPECT_EQ(u.encode(excerpt()), t.encode(excerpt()));
    EXPECT_EQ(u.id_of(kEndOfText), t.id_of(kEndOfText));
    u.save(dir / "u.json");
    EXPECT_EQ(ScratchFolder::read(dir / "u.json"), ScratchFolder::read(dir / "t.json"));
  }
}

TEST(Tokenizer, FingerprintTellsTokenizersApart) {
  const Tokenizer a = train({"aaaa bbbb"}, {.vocab_size = 258});
  const Tokenizer b = train({"bbbb aaaa cccc cccc cccc"}, {.vocab_size = 258});
  const Tokenizer c = train({"aaaa bbbb"}, {.vocab_size = 258, .pattern = SplitPattern::gpt2});
  const Tokenizer d = train({"aaaa bbbb"}, {.vocab_size = 258, .specials = {"<|other|>"}});
  EXPECT_EQ(a.fingerprint().size(), 16u);
  for (const auto* other : {&b, &c, &d}) EXPECT_NE(a.fingerprint(), other->fingerprint());
}

// A small valid file to spoil.
json good_file() {
  static const json file = [] {
    const ScratchFolder dir;
    train({"the the then"}, {.vocab_size = 260}).save(dir / "t.json");
    return json::parse(ScratchFolder::read(dir / "t.json"));
  }();
  return file;
}

std::string load_error(const json& file) {
  const ScratchFolder dir;
  const std::string path = dir.write("bad.json", file.dump());
  return message_of<DataError>([&] { Tokenizer::load(path); });
}

TEST(TokenizerFile, MergesAreReadInBothSpellings) {
  const ScratchFolder dir;
  json file = good_file();
  const Tokenizer arrays = Tokenizer::load(dir.write("a.json", file.dump()));
  for (auto& m : file["model"]["merges"]) m = m[0].get<std::string>() + " " + m[1].get<std::string>();
  const Tokenizer strings = Tokenizer::load(dir.write("b.json", file.dump()));
  EXPECT_EQ(arrays.fingerprint(), strings.fingerprint());
  EXPECT_EQ(arrays.parts().merges.size(), 3u);
}

TEST(TokenizerFile, SpecialsBesideTheVocabularyAreRead) {
  const ScratchFolder dir;
  json file = good_file();
  file["model"]["vocab"].erase("<|endoftext|>");  // as Llama 3's file has it
  EXPECT_EQ(Tokenizer::load(dir.write("t.json", file.dump())).id_of(kEndOfText), 259);
}

TEST(TokenizerFile, WholePieceFirst) {
  // "xyz" is reachable by no merge; with ignore_merges a piece that is a token is taken whole.
  const ScratchFolder dir;
  json file = good_file();
  file["model"]["vocab"]["xyz"] = 260;
  const Tokenizer merging = Tokenizer::load(dir.write("a.json", file.dump()));
  EXPECT_EQ(merging.encode("xyz").size(), 3u);
  file["model"]["ignore_merges"] = true;
  const Tokenizer whole = Tokenizer::load(dir.write("b.json", file.dump()));
  EXPECT_EQ(whole.encode("xyz"), (std::vector<int32_t>{260}));
  EXPECT_NE(whole.fingerprint(), merging.fingerprint());
}

TEST(TokenizerFile, WhatWouldEncodeDifferentlyIsRefused) {
  const auto with = [](const char* pointer, const json& value) {
    json file = good_file();
    file[json::json_pointer(pointer)] = value;
    return load_error(file);
  };
  EXPECT_CONTAINS(with("/normalizer", {{"type", "NFC"}}), "normalizer");
  EXPECT_CONTAINS(with("/truncation", {{"max_length", 5}}), "truncation");
  EXPECT_CONTAINS(with("/surprise", 1), "surprise");
  EXPECT_CONTAINS(with("/decoder", nullptr), "decoder");
  EXPECT_CONTAINS(with("/model/type", "Unigram"), "Unigram");
  EXPECT_CONTAINS(with("/model/dropout", 0.1), "dropout");
  EXPECT_CONTAINS(with("/model/byte_fallback", true), "byte_fallback");
  EXPECT_CONTAINS(with("/model/unk_token", "<unk>"), "unk_token");
  EXPECT_CONTAINS(with("/model/extra", 1), "extra");
  EXPECT_CONTAINS(with("/pre_tokenizer", nullptr), "pre_tokenizer");
  EXPECT_CONTAINS(with("/pre_tokenizer", {{"type", "Whitespace"}}), "pre_tokenizer");
  EXPECT_CONTAINS(with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"), "\\w+");
  EXPECT_CONTAINS(with("/pre_tokenizer/pretokenizers/0/behavior", "Removed"), "Isolated");
  EXPECT_CONTAINS(with("/pre_tokenizer/pretokenizers/1/add_prefix_space", true), "add_prefix_space");
  EXPECT_CONTAINS(with("/added_tokens/0/lstrip", true), "lstrip");
  EXPECT_CONTAINS(with("/added_tokens/0", 7), "id and content");
}

TEST(TokenizerFile, DamageIsNamed) {
  const auto spoil = [](auto&& change) {
    json file = good_file();
    change(file);
    return load_error(file);
  };
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["vocab"]["t"] = 3; }), "id 3");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["vocab"]["t"] = 1000; }), "1000");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["vocab"]["t"] = "x"; }), "\"x\"");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["vocab"]["\u4e16"] = 260; }), "alphabet");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["merges"].push_back({"x", "y"}); }), "\"xy\"");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["merges"].push_back(f["model"]["merges"][0]); }), "repeats");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"]["merges"][0] = "abc"; }), "pair");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"].erase("merges"); }), "merges");
  EXPECT_CONTAINS(spoil([](json& f) { f["model"].erase("vocab"); }), "vocab");
  EXPECT_CONTAINS(spoil([](json& f) { f["added_tokens"][0]["id"] = 9999; }), "9999");
  EXPECT_CONTAINS(spoil([](json& f) { f["added_tokens"][0]["id"] = (int64_t{1} << 32) + 999; }), "4294968295");
  EXPECT_CONTAINS(spoil([](json& f) {  // a vocabulary without the byte z: its id goes to another token
                    f["model"]["vocab"]["zz"] = f["model"]["vocab"]["z"];
                    f["model"]["vocab"].erase("z");
                  }),
                  "single byte 122");
  const ScratchFolder dir;
  EXPECT_CONTAINS(message_of<DataError>([&] { Tokenizer::load(dir.write("a.json", "{\"model\": ")); }), "a.json");
  EXPECT_CONTAINS(message_of<DataError>([&] { Tokenizer::load(dir.write("b.json", "[1]")); }), "b.json");
  EXPECT_CONTAINS(message_of<DataError>([&] { Tokenizer::load(dir / "none.json"); }), "kestrel tokenizer train");
  EXPECT_CONTAINS(message_of<DataError>([&] { bible().save(dir / "no/such/folder.json"); }), "folder.json");
}

TEST(BpeTrainer, LearnsTheTextbookExample) {
  // Word counts low 5, lower 2, newest 6, widest 3.  Pairs: (e,s) 9, (s,t) 9, (w,e) 8, (l,o) 7 ...  Ties go to the
  // smaller left id: e < s.  Then (es,t) 9; (l,o) 7 and (o,w) 7 tie, l < o; (lo,w) 7; (e,w), (n,e) and
  // (w,est) 6: e first; then (n,ew) and (ew,est) 6: a byte's id is below a merge's.
  std::string s;
  for (int i = 0; i < 5; ++i) s += "low\n";
  for (int i = 0; i < 2; ++i) s += "lower\n";
  for (int i = 0; i < 6; ++i) s += "newest\n";
  for (int i = 0; i < 3; ++i) s += "widest\n";
  const Tokenizer t = train({s}, {.vocab_size = 256 + 6, .specials = {}});
  std::vector<std::string> learned(t.parts().tokens.begin() + 256, t.parts().tokens.end());
  EXPECT_EQ(learned, (std::vector<std::string>{"es", "est", "lo", "low", "ew", "new"}));
}

// Recounts everything before every merge.
std::vector<std::string> naive_training(const std::string& text, size_t merges) {
  std::vector<std::vector<int32_t>> words;
  for (size_t i = 0; i < text.size();) {
    const size_t end = piece_end(SplitPattern::cl100k, text, i);
    words.emplace_back();
    for (; i < end; ++i) words.back().push_back(static_cast<uint8_t>(text[i]));
  }
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  for (size_t m = 0; m < merges; ++m) {
    std::map<std::pair<int32_t, int32_t>, int64_t> counts;
    for (const auto& w : words) {
      for (size_t i = 0; i + 1 < w.size(); ++i) ++counts[{w[i], w[i + 1]}];
    }
    std::pair<int32_t, int32_t> best;
    int64_t most = 1;
    for (const auto& [pair, n] : counts) {
      if (n > most) most = n, best = pair;
    }
    if (most < 2) break;
    const auto merged = static_cast<int32_t>(tokens.size());
    tokens.push_back(tokens[static_cast<size_t>(best.first)] + tokens[static_cast<size_t>(best.second)]);
    for (auto& w : words) {
      std::vector<int32_t> next;
      for (size_t i = 0; i < w.size(); ++i) {
        const bool hit = i + 1 < w.size() && w[i] == best.first && w[i + 1] == best.second;
        next.push_back(hit ? merged : w[i]);
        i += hit;
      }
      w = next;
    }
  }
  return tokens;
}

TEST(BpeTrainer, IncrementalCountsEqualRecounting) {
  const std::string text = excerpt().substr(0, 20000) + " aaaa aaaaa aaa aaaaaaa ababababab abababa";
  const size_t merges = 150;
  const auto naive = naive_training(text, merges);
  const Tokenizer t = train({text}, {.vocab_size = 256 + static_cast<int64_t>(merges), .specials = {}});
  EXPECT_EQ(t.parts().tokens, naive);
}

TEST(BpeTrainer, ThreadsAndBatchesChangeNothing) {
  const std::string text = excerpt();
  const int threads = omp_get_max_threads();
  std::vector<std::string> fingerprints;
  for (int n : {1, 2, 5}) {
    omp_set_num_threads(n);
    fingerprints.push_back(train({text, "another one"}, {.vocab_size = 700}).fingerprint());
  }
  omp_set_num_threads(threads);
  BpeTrainer batched({.vocab_size = 700});
  batched.add(std::vector<std::string>{"another one"});
  batched.add(std::vector<std::string>{text});
  fingerprints.push_back(batched.train().fingerprint());
  for (const auto& f : fingerprints) EXPECT_EQ(f, fingerprints.front());
}

TEST(BpeTrainer, StopsWhenNoPairRepeats) {
  const Tokenizer t = train({"ab ab"}, {.vocab_size = 5000});
  EXPECT_EQ(t.vocab_size(), 256 + 1 + 1);  // "ab" (twice), <|endoftext|>; " ab" occurs once
}

TEST(BpeTrainer, RefusesBadOptions) {
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.vocab_size = 256}); }), "256");
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.vocab_size = 1 << 25}); }), "33554432");
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.specials = {"<a>", "<a>"}}); }), "<a>");
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.specials = {""}}); }), "empty");
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.specials = {"<\xff>"}}); }), "not valid UTF-8");
  // tokenizer.json spells a space U+0120, and knows tokens by their spelling alone.
  for (const char* special : {"a", "\u0120a"}) {
    const BpeOptions options{.vocab_size = 259, .specials = {special}};
    EXPECT_CONTAINS(message_of<ConfigError>([&] { train({"a a a a"}, options); }), "token of plain text");
  }
  EXPECT_CONTAINS(message_of<ConfigError>([] { BpeTrainer({.min_count = 0}); }), "below 1");
  EXPECT_CONTAINS(message_of<DataError>([] { (void)train({""}, {}); }), "no text");
}

}  // namespace
}  // namespace kestrel
