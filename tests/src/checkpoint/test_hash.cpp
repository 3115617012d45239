#include <gtest/gtest.h>

#include <utility>

#include "src/checkpoint/hash.h"

namespace kestrel {
namespace {

std::string sample(size_t n) {
  std::string s(n, '\0');
  for (size_t i = 0; i < n; ++i) s[i] = static_cast<char>(i * 131 + 7);
  return s;
}

// Values of the reference implementation (python-xxhash).
TEST(Xxh64, GoldenValuesOfEveryTailLength) {
  const std::pair<size_t, const char*> golden[] = {
      {0, "ef46db3751d8e999"},   {1, "a96c7f0ce858bbb7"},  {3, "bed43740ee6332bb"},  {4, "fa212ae44b3bb23d"},
      {7, "2744460dd675d2c0"},   {8, "994b676b71ce94dd"},  {31, "6711d55e306b5d8f"}, {32, "07f7b8e3bc5d6e25"},
      {33, "09f85eeb4e1cbe9f"},  {63, "b7c9968c066cb6a5"}, {64, "50d4159a0411632e"}, {100, "9ddada11d3dc2d8f"},
      {1000, "0bf0bdbcc82eb373"}};
  for (const auto& [n, expected] : golden) EXPECT_EQ(xxh64_hex(sample(n)), expected) << n;
  Xxh64 seeded(2654435761u);
  seeded.update(sample(1000).data(), 1000);
  EXPECT_EQ(hex(seeded.digest()), "b43e358553049780");
}

TEST(Xxh64, PiecesGiveTheSameAsTheWhole) {
  const std::string s = sample(1000);
  for (size_t piece : {1u, 7u, 31u, 32u, 33u, 500u}) {
    Xxh64 h;
    for (size_t i = 0; i < s.size(); i += piece) h.update(s.data() + i, std::min(piece, s.size() - i));
    EXPECT_EQ(hex(h.digest()), "0bf0bdbcc82eb373") << piece;
  }
}

}  // namespace
}  // namespace kestrel
