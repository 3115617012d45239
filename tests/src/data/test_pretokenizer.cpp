#include "src/data/pretokenizer.h"

#include <random>

#include "src/data/text_pieces.h"
#include "tests/src/data/scratch_folder.h"

namespace kestrel {
namespace {

using Pieces = std::vector<std::string>;

Pieces split(SplitPattern pattern, std::string_view s) {
  Pieces out;
  for (size_t i = 0; i < s.size();) {
    const size_t end = piece_end(pattern, s, i);
    EXPECT_GT(end, i);
    EXPECT_LE(end, s.size());
    if (end <= i) break;
    out.emplace_back(s.substr(i, end - i));
    i = end;
  }
  return out;
}
Pieces cl100k(std::string_view s) {
  return split(SplitPattern::cl100k, s);
}
Pieces gpt2(std::string_view s) {
  return split(SplitPattern::gpt2, s);
}

// Read off the regular expression by hand; check_tokenizers.py compares far more text with its real engine.
TEST(Pretokenizer, Cl100k) {
  EXPECT_EQ(cl100k("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(cl100k("I'll DON'T we'Re"), (Pieces{"I", "'ll", " DON", "'T", " we", "'Re"}));
  EXPECT_EQ(cl100k("'sauce 'x"), (Pieces{"'s", "auce", " '", "x"}));
  EXPECT_EQ(cl100k("12345 6"), (Pieces{"123", "45", " ", "6"}));
  EXPECT_EQ(cl100k("a  b"), (Pieces{"a", " ", " b"}));
  EXPECT_EQ(cl100k("a   "), (Pieces{"a", "   "}));
  EXPECT_EQ(cl100k("x = (y);\n\n  z"), (Pieces{"x", " =", " (", "y", ");\n\n", " ", " z"}));
  EXPECT_EQ(cl100k("a \n \n b"), (Pieces{"a", " \n \n", " b"}));
  EXPECT_EQ(cl100k("(word _word"), (Pieces{"(word", " _", "word"}));
  EXPECT_EQ(cl100k("\tx\t\ty"), (Pieces{"\tx", "\t", "\ty"}));
  EXPECT_EQ(cl100k("it'\xc5\xbf"), (Pieces{"it", "'\xc5\xbf"}));  // long s: folds to s
  EXPECT_EQ(cl100k(""), Pieces{});
}

TEST(Pretokenizer, Gpt2) {
  EXPECT_EQ(gpt2("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(gpt2("I'll DON'T"), (Pieces{"I", "'ll", " DON", "'", "T"}));
  EXPECT_EQ(gpt2("12345 6"), (Pieces{"12345", " 6"}));
  EXPECT_EQ(gpt2("a\n\nb"), (Pieces{"a", "\n", "\n", "b"}));
  EXPECT_EQ(gpt2("a  b  "), (Pieces{"a", " ", " b", "  "}));
  EXPECT_EQ(gpt2("x = (y)"), (Pieces{"x", " =", " (", "y", ")"}));
}

TEST(Pretokenizer, UnicodeLettersNumbersAndSpaces) {
  EXPECT_EQ(cl100k("caf\u00e9 \u4e16\u754c!"), (Pieces{"caf\u00e9", " \u4e16\u754c", "!"}));
  EXPECT_EQ(cl100k("\u0661\u0662\u0663\u0664"), (Pieces{"\u0661\u0662\u0663", "\u0664"}));  // Arabic-Indic digits
  EXPECT_EQ(cl100k("a\u00a0b"), (Pieces{"a", "\u00a0b"}));                                  // no-break space
  EXPECT_EQ(gpt2("a\u3000\u3000b"), (Pieces{"a", "\u3000", "\u3000", "b"}));                // ideographic space
  EXPECT_EQ(cl100k("hi \U0001f600\U0001f600"), (Pieces{"hi", " \U0001f600\U0001f600"}));
  EXPECT_EQ(cl100k("e\u0301x"), (Pieces{"e", "\u0301x"}));  // a combining mark is no letter
}

TEST(Pretokenizer, InvalidBytesAreCharactersOfTheirOwn) {
  EXPECT_EQ(cl100k("\xff"
                   "ab"),
            (Pieces{"\xff"
                    "ab"}));
  EXPECT_EQ(cl100k("ab\xc3"), (Pieces{"ab", "\xc3"}));                          // cut off
  EXPECT_EQ(cl100k("a\xc0\xaf!"), (Pieces{"a", "\xc0\xaf!"}));                  // overlong
  EXPECT_EQ(cl100k("a\xed\xa0\x80!"), (Pieces{"a", "\xed\xa0\x80!"}));          // a surrogate
  EXPECT_EQ(cl100k("a\xf4\x90\x80\x80!"), (Pieces{"a", "\xf4\x90\x80\x80!"}));  // past U+10FFFF
  EXPECT_EQ(cl100k(std::string_view("a\0\0b", 4)), (Pieces{"a", std::string("\0\0", 2), "b"}));
}

TEST(Pretokenizer, NamesAndExpressionsIdentifyAPattern) {
  for (auto p : {SplitPattern::cl100k, SplitPattern::gpt2}) {
    EXPECT_EQ(pattern_from_regex(regex_of(p)), p);
    EXPECT_EQ(pattern_from_name(name_of(p)), p);
  }
  EXPECT_FALSE(pattern_from_regex(R"(\w+)").has_value());
  EXPECT_FALSE(pattern_from_name("none").has_value());
}

// Text over an alphabet that meets every rule, cut anywhere safe_cut allows, has the pieces of the whole.
TEST(Pretokenizer, SafeCutsChangeNoPiece) {
  std::mt19937 rng(7);
  const std::vector<std::string> alphabet = {"a", "Z", "7", " ",      "\n",     "\r",  "\t",
                                             ".", "'", "s", "\u00e9", "\u00a0", "\xff"};
  int cuts = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string s;
    for (int i = 0; i < 40; ++i) s += alphabet[rng() % alphabet.size()];
    const size_t cut = safe_cut(s, rng() % 20);
    if (cut == s.size()) continue;
    ++cuts;
    for (auto p : {SplitPattern::cl100k, SplitPattern::gpt2}) {
      Pieces joined = split(p, std::string_view(s).substr(0, cut));
      for (auto& piece : split(p, std::string_view(s).substr(cut))) joined.push_back(piece);
      ASSERT_EQ(joined, split(p, s)) << "cut at " << cut;
    }
  }
  EXPECT_GT(cuts, 100);
}

TEST(TextPieces, CoverEveryDocumentInOrder) {
  std::string lines;
  for (int i = 0; i < 60000; ++i) lines += "line " + std::to_string(i) + ".\n";
  const std::vector<std::string> documents = {"", lines, "x", std::string(600000, 'a')};
  std::vector<std::string> joined(documents.size());
  size_t previous = 0;
  std::vector<int> count(documents.size());
  for (const auto& p : cut_documents(documents)) {
    EXPECT_GE(p.document, previous);
    previous = p.document;
    joined[p.document] += p.text;
    ++count[p.document];
  }
  EXPECT_EQ(joined, documents);
  EXPECT_EQ(count[0], 1);
  EXPECT_GT(count[1], 2);
  EXPECT_EQ(count[3], 1);  // nowhere to cut
}

}  // namespace
}  // namespace kestrel
