#include "src/data/dataset.h"

#include <numeric>

#include "kernels/core/error.h"
#include "src/data/loader.h"
#include "tests/src/data/scratch_folder.h"

namespace kestrel {
namespace {

using test::message_of;
using test::ScratchFolder;
using Ids = std::vector<int32_t>;

constexpr int64_t kVocab = 1000;

// Tokens first, first + 1, ...
std::string counting_shard(const ScratchFolder& dir, const std::string& name, int32_t first, int64_t n,
                           const std::string& tokenizer = "") {
  ShardContents c;
  c.tokens.resize(static_cast<size_t>(n));
  std::iota(c.tokens.begin(), c.tokens.end(), first);
  c.vocab_size = kVocab;
  c.text_bytes = 10 * n;
  c.tokenizer = tokenizer;
  c.token_bytes.assign(kVocab, 2);
  write_shard(dir / name, c);
  return dir / name;
}

struct Row {
  Ids tokens, targets, segment;
};
Row row(const TokenDataset& d, int64_t r) {
  const auto T = static_cast<size_t>(d.sequence_length());
  Row out{Ids(T, -7), Ids(T, -7), Ids(T, -7)};
  d.read_row(r, out.tokens.data(), out.targets.data(), out.segment.data());
  return out;
}

TEST(TokenDataset, RowsAreWindowsAtStrideT) {
  const ScratchFolder dir;
  counting_shard(dir, "a.safetensors", 0, 10);   // 3 rows of 3 (+1)
  counting_shard(dir, "b.safetensors", 100, 9);  // 2 rows: 8 / 3
  counting_shard(dir, "c.safetensors", 200, 4);  // 1 row exactly
  const TokenDataset d({dir / "*.safetensors"}, 3, kVocab);
  EXPECT_EQ(d.rows(), 6);
  EXPECT_EQ(d.tokens(), 23);
  EXPECT_EQ(d.bytes(), 230);
  const std::vector<int32_t> first = {0, 3, 6, 100, 103, 200};
  for (int64_t r = 0; r < 6; ++r) {
    const int32_t f = first[static_cast<size_t>(r)];
    EXPECT_EQ(row(d, r).tokens, (Ids{f, f + 1, f + 2}));
    EXPECT_EQ(row(d, r).targets, (Ids{f + 1, f + 2, f + 3}));
    EXPECT_EQ(row(d, r).segment, (Ids{0, 0, 0}));
  }
  EXPECT_FALSE(d.knows_documents());
  EXPECT_EQ(d.token_bytes(), Ids(kVocab, 2));
}

TEST(TokenDataset, FilesComeInTheOrderGiven) {
  const ScratchFolder dir;
  const auto a = counting_shard(dir, "a.safetensors", 0, 10), b = counting_shard(dir, "b.safetensors", 100, 10);
  const TokenDataset ba({b, a}, 3, kVocab), ab({a, b}, 3, kVocab);
  EXPECT_EQ(row(ba, 0).tokens[0], 100);
  EXPECT_EQ(row(ba, 3).tokens[0], 0);
  EXPECT_NE(ab.fingerprint(), ba.fingerprint());
  EXPECT_EQ(ab.fingerprint(), TokenDataset({dir / "?.safetensors"}, 3, kVocab).fingerprint());
}

TEST(TokenDataset, SegmentsFollowDocumentStartsOrEos) {
  const ScratchFolder dir;
  ShardContents c;
  c.tokens = {5, 6, 1, 7, 1, 8, 9, 1, 1, 4, 4};
  c.vocab_size = kVocab;
  c.eos_id = 1;
  write_shard(dir / "eos.safetensors", c);
  c.document_starts = {0, 3, 5, 8, 9};
  write_shard(dir / "starts.safetensors", c);
  for (const char* name : {"eos.safetensors", "starts.safetensors"}) {
    const TokenDataset d({dir / name}, 5, kVocab);
    EXPECT_TRUE(d.knows_documents());
    EXPECT_EQ(row(d, 0).segment, (Ids{0, 0, 0, 1, 1})) << name;
    EXPECT_EQ(row(d, 1).segment, (Ids{0, 0, 0, 1, 2})) << name;  // row 1 begins with a document: still 0
  }
  c.document_starts = {2};  // where both are there, document_starts is right
  write_shard(dir / "both.safetensors", c);
  EXPECT_EQ(row(TokenDataset({dir / "both.safetensors"}, 5, kVocab), 0).segment, (Ids{0, 0, 1, 1, 1}));
}

TEST(TokenDataset, TokenBytesFitTheModelAndMustBeShared) {
  const ScratchFolder dir;
  counting_shard(dir, "a.safetensors", 0, 10);
  const TokenDataset padded({dir / "a.safetensors"}, 3, kVocab + 24);
  ASSERT_EQ(padded.token_bytes().size(), static_cast<size_t>(kVocab + 24));
  EXPECT_EQ(padded.token_bytes().back(), 0);
  ShardContents c;
  c.tokens = {1, 2, 3, 4, 5};
  c.vocab_size = kVocab;
  write_shard(dir / "b.safetensors", c);
  const TokenDataset mixed({dir / "a.safetensors", dir / "b.safetensors"}, 3, kVocab);
  EXPECT_TRUE(mixed.token_bytes().empty());
  EXPECT_EQ(mixed.bytes(), -1);
}

TEST(TokenDataset, BadDataIsNamed) {
  const ScratchFolder dir;
  const auto a = counting_shard(dir, "a.safetensors", 0, 10, "tokenizer-a");
  const auto b = counting_shard(dir, "b.safetensors", 0, 10, "tokenizer-b");
  const auto error = [](std::vector<std::string> files, int64_t T, int64_t vocab, const std::string& tokenizer = "") {
    return message_of<DataError>([&] { TokenDataset(files, T, vocab, tokenizer); });
  };
  EXPECT_CONTAINS(error({a}, 10, kVocab), "shorter than one row of 11");
  EXPECT_CONTAINS(error({a}, 3, kVocab - 1), "vocabulary of 1000");
  EXPECT_CONTAINS(error({a}, 3, kVocab, "tokenizer-b"), "tokenizer-a");
  EXPECT_CONTAINS(error({a, b}, 3, kVocab), "tokenizer-b");
  const auto unknown = counting_shard(dir, "c.safetensors", 0, 10);
  EXPECT_CONTAINS(error({unknown, a, b}, 3, kVocab), "tokenizer-b");  // though the first does not say
  EXPECT_EQ(TokenDataset({unknown, a}, 3, kVocab).tokenizer(), "tokenizer-a");
  EXPECT_CONTAINS(error({}, 3, kVocab), "empty");
  EXPECT_CONTAINS(error({dir / "none-*.bin"}, 3, kVocab), "none-*.bin");
  EXPECT_CONTAINS(error({dir / "none.bin"}, 3, kVocab), "none.bin");
  EXPECT_CONTAINS(message_of<ConfigError>([&] { TokenDataset({a}, 0, kVocab); }), "sequence_length");
  ShardContents c;
  c.tokens = {1, 2, 3, 500, 5};
  c.vocab_size = kVocab;
  c.tokens[3] = 1000;
  write_shard(dir / "ids.safetensors", c);
  const std::string message = error({dir / "ids.safetensors"}, 3, 2 * kVocab);
  EXPECT_CONTAINS(message, "token 3 is id 1000");
  EXPECT_CONTAINS(message, "vocabulary of 1000");
  EXPECT_EQ(TokenDataset({a}, 9, kVocab, "tokenizer-a").rows(), 1);
}

class Loading : public ::testing::Test {
 protected:
  Loading()
      : data_({counting_shard(dir_, "a.safetensors", 0, 100), counting_shard(dir_, "b.safetensors", 500, 50)}, 4,
              kVocab) {}
  // The first token of every row of a step, in order.
  static Ids rows_of(BatchLoader& loader, int64_t step, int64_t micros) {
    Ids first;
    for (int64_t m = 0; m < micros; ++m) {
      const Batch& b = loader.fetch(step, m);
      for (int64_t r = 0; r < b.rows; ++r) first.push_back(b.tokens[static_cast<size_t>(r * b.sequence_length)]);
    }
    return first;
  }
  ScratchFolder dir_;
  TokenDataset data_;
};

TEST_F(Loading, MicroBatchSizeAndRanksDoNotChangeTheRowsOfAStep) {
  const SamplerParams p{.global_batch_size = 12, .shuffle = true, .seed = 3};
  BatchLoader whole(data_, p, 12);
  BatchLoader quarters(data_, p, 3, {.first = 0, .count = 4});
  BatchLoader rank0(data_, p, 2, {.first = 0, .count = 3}), rank1(data_, p, 2, {.first = 3, .count = 3});
  for (int64_t step = 0; step < 9; ++step) {  // 36 rows: three epochs
    const Ids expected = rows_of(whole, step, 1);
    EXPECT_EQ(rows_of(quarters, step, 4), expected);
    Ids joined;
    for (int64_t m = 0; m < 6; ++m) {
      const Batch& b = (m < 3 ? rank0 : rank1).fetch(step, m);
      joined.insert(joined.end(), {b.tokens[0], b.tokens[4]});
    }
    EXPECT_EQ(joined, expected);
  }
}

TEST_F(Loading, FetchIsStateless) {
  const SamplerParams p{.global_batch_size = 8, .shuffle = true, .seed = 4};
  BatchLoader with(data_, p, 4, {.first = 0, .count = 2}, true), without(data_, p, 4, {.first = 0, .count = 2}, false);
  std::vector<Ids> in_order;
  for (int64_t n = 0; n < 20; ++n) in_order.push_back(with.fetch(n / 2, n % 2).tokens);
  for (int64_t n : {7, 3, 3, 19, 0, 1, 2, 12}) {  // as after a resume, or out of order
    EXPECT_EQ(with.fetch(n / 2, n % 2).tokens, in_order[static_cast<size_t>(n)]);
    EXPECT_EQ(without.fetch(n / 2, n % 2).tokens, in_order[static_cast<size_t>(n)]);
  }
}

TEST_F(Loading, BatchesHoldWholeRows) {
  BatchLoader loader(data_, {.global_batch_size = 5, .shuffle = true, .seed = 1}, 5);
  const Batch& b = loader.fetch(2, 0);
  ASSERT_EQ(b.rows, 5);
  ASSERT_EQ(b.sequence_length, 4);
  for (int64_t r = 0; r < 5; ++r) {
    const Row expected = row(data_, loader.sampler().row(2, r));
    for (size_t t = 0; t < 4; ++t) {
      const size_t i = static_cast<size_t>(r) * 4 + t;
      EXPECT_EQ(b.tokens[i], expected.tokens[t]);
      EXPECT_EQ(b.targets[i], expected.targets[t]);
      EXPECT_EQ(b.segment[i], expected.segment[t]);
    }
  }
}

TEST_F(Loading, FileOrderAndEpochs) {
  BatchLoader loader(data_, {.global_batch_size = 10, .shuffle = false, .seed = 0}, 10);
  EXPECT_EQ(data_.rows(), 24 + 12);
  EXPECT_EQ(rows_of(loader, 0, 1), (Ids{0, 4, 8, 12, 16, 20, 24, 28, 32, 36}));
  EXPECT_EQ(rows_of(loader, 3, 1), (Ids{524, 528, 532, 536, 540, 544, 0, 4, 8, 12}));  // rows 30 to 35, then epoch 1
}

TEST_F(Loading, ReadRowsPadsPastTheEnd) {
  Batch b;
  read_rows(data_, data_.rows() - 1, 3, b);
  ASSERT_EQ(b.tokens.size(), 12u);
  EXPECT_EQ(b.tokens[0], 544);
  EXPECT_EQ(b.targets[3], 548);
  for (size_t i = 4; i < 12; ++i) {
    EXPECT_EQ(b.tokens[i], 0);
    EXPECT_EQ(b.targets[i], -100);
    EXPECT_EQ(b.segment[i], 0);
  }
}

TEST_F(Loading, BadSizesAreNamed) {
  const auto error = [&](int64_t G, int64_t B, MicroRange mine) {
    return message_of<ConfigError>([&] { BatchLoader(data_, {.global_batch_size = G}, B, mine); });
  };
  EXPECT_CONTAINS(error(8, 3, {}), "not a multiple");
  EXPECT_CONTAINS(error(8, 0, {}), "micro_batch_size 0");
  EXPECT_CONTAINS(error(0, 1, {}), "below 1");
  EXPECT_CONTAINS(error(8, 4, {.first = 1, .count = 2}), "micro-batches 1 to 2");
  BatchLoader loader(data_, {.global_batch_size = 8}, 4);
  EXPECT_THROW(loader.fetch(0, 2), ContractError);
  EXPECT_THROW(loader.fetch(-1, 0), ContractError);
}

TEST_F(Loading, DroppingALoaderMidwayEnds) {
  for (int i = 0; i < 50; ++i) {
    BatchLoader loader(data_, {.global_batch_size = 8}, 8);
    if (i % 2) loader.fetch(i, 0);
  }
  SUCCEED();
}

}  // namespace
}  // namespace kestrel
