#include "kernels/embedding/embedding.h"

#include "tests/kernels/norm/naive.h"

namespace kestrel::test {
namespace {

struct Size {
  int64_t N, V, D;
};
class EmbeddingSizes : public testing::TestWithParam<Size> {};
// 1, primes, more than one block of columns with a tail.
INSTANTIATE_TEST_SUITE_P(Awkward, EmbeddingSizes,
                         testing::Values(Size{1, 1, 1}, Size{13, 5, 7}, Size{29, 11, 131}, Size{3, 97, 64}));

void random_ids(Buffer& ids, int64_t V) {
  std::mt19937_64 rng(9);
  for (int64_t n = 0; n < ids->numel(); ++n) ids->i32()[n] = static_cast<int32_t>(rng() % static_cast<uint64_t>(V));
}

TEST_P(EmbeddingSizes, ForwardCopiesAndBackwardAddsInTokenOrder) {
  const auto [N, V, D] = GetParam();
  CpuStream s;
  Buffer ids({N}, DType::i32), table0({V, D}), dy0({N, D}), dtable0({V, D});
  random_ids(ids, V);
  table0.normal(1), dy0.normal(2), dtable0.normal(3);
  Block table(V, D), y(N, D), dy(N, D), dtable(V, D);
  table.copy(table0), dy.copy(dy0), dtable.copy(dtable0);
  embedding_forward(s, y, ids, table);
  embedding_backward(s, dtable, dy, ids);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t id = ids->i32()[n];
    for (int64_t c = 0; c < D; ++c) {
      EXPECT_EQ((*y).f32()[n * (*y).ld + c], table0[id * D + c]);
      dtable0[id * D + c] += dy0[n * D + c];  // the same additions in the same order: the same bits
    }
  }
  EXPECT_TRUE(same_bits(dtable, dtable0));
  EXPECT_TRUE(y.untouched() && dtable.untouched());
}

TEST(Embedding, BackwardIsTheAdjointOfForward) {
  const int64_t B = 3, T = 17, V = 19, D = 23;
  CpuStream s;
  Buffer ids({B, T}, DType::i32), table({V, D}), y({B, T, D}), dy({B, T, D}), dtable({V, D});
  random_ids(ids, V);
  table.normal(1), dy.normal(2), dtable.zero();
  embedding_forward(s, y, ids, table);
  embedding_backward(s, dtable, dy, ids);
  // <dy, E(table)> = <E^T(dy), table>; sums of 1173 fp32 products, each gradient entry a sum of a few dy.
  EXPECT_NEAR(inner(doubles(dy), doubles(y)), inner(doubles(dtable), doubles(table)), 1e-4);
}

TEST(Embedding, BitsDoNotDependOnTheThreadCount) {
  const int64_t N = 211, V = 7, D = 200;
  CpuStream s;
  Buffer ids({N}, DType::i32), dy({N, D}), one({V, D}), two({V, D});
  random_ids(ids, V);
  dy.normal(2), one.zero(), two.zero();
  with_threads(1, [&] { embedding_backward(s, one, dy, ids); });
  with_threads(2, [&] { embedding_backward(s, two, dy, ids); });
  EXPECT_TRUE(same_bits(one, two));
}

TEST(Embedding, IdsOutsideTheTableAndWrongShapesAreRefused) {
  CpuStream s;
  Buffer ids({2}, DType::i32), table({3, 4}), y({2, 4}), three({3, 4}), narrow({2, 3}), none({0, 4});
  Buffer no_ids({0}, DType::i32);
  table.normal(1);
  ids->i32()[0] = 2, ids->i32()[1] = 3;
  EXPECT_THROW(embedding_forward(s, y, ids, table), ContractError);
  EXPECT_THROW(embedding_backward(s, table, y, ids), ContractError);
  ids->i32()[1] = -1;
  EXPECT_THROW(embedding_forward(s, y, ids, table), ContractError);
  ids->i32()[1] = 0;
  EXPECT_NO_THROW(embedding_forward(s, y, ids, table));
  EXPECT_THROW(embedding_forward(s, three, ids, table), ContractError);
  EXPECT_THROW(embedding_forward(s, narrow, ids, table), ContractError);
  const Doubles before = doubles(table);
  embedding_forward(s, none, no_ids, table);
  embedding_backward(s, table, none, no_ids);
  EXPECT_EQ(doubles(table), before);
}

}  // namespace
}  // namespace kestrel::test
