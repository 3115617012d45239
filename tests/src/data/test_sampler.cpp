#include "src/data/sampler.h"

#include <cmath>
#include <set>
#include <vector>

#include "kernels/core/error.h"
#include "tests/src/data/scratch_folder.h"

namespace kestrel {
namespace {

TEST(Permutation, IsABijectionForEverySize) {
  for (int64_t n = 1; n <= 1000; ++n) {
    std::vector<bool> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = permuted_index(i, n, 5, static_cast<uint64_t>(n));
      ASSERT_TRUE(j >= 0 && j < n && !seen[static_cast<size_t>(j)]) << n << " " << i << " -> " << j;
      seen[static_cast<size_t>(j)] = true;
    }
  }
}

TEST(Permutation, LargeSizesStayInside) {
  for (int64_t n : {(int64_t{1} << 40) + 1, int64_t{1} << 40, (int64_t{1} << 40) - 1}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 2000; ++i) {
      const int64_t j = permuted_index(n - 1 - i * 7919, n, 1, 2);
      ASSERT_TRUE(j >= 0 && j < n);
      ASSERT_TRUE(seen.insert(j).second);
    }
  }
}

TEST(Permutation, LooksRandom) {
  // Of a random permutation of n: about 1 fixed point, rank correlation with the identity ~ N(0, 1/n), and each of 16
  // bins gets n/256 of each of 16 bins.  Bounds at 5 standard deviations; the inputs are fixed, so this cannot flake.
  const int64_t n = 16000;
  for (uint64_t seed : {0, 1, 2}) {
    double correlation = 0;
    int fixed = 0;
    std::vector<int> bins(256);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = permuted_index(i, n, seed, 0);
      fixed += i == j;
      correlation += (static_cast<double>(i) / n - 0.5) * (static_cast<double>(j) / n - 0.5) * 12 / n;
      ++bins[static_cast<size_t>(i * 16 / n * 16 + j * 16 / n)];
    }
    EXPECT_LT(fixed, 8);
    EXPECT_LT(std::abs(correlation), 5 / std::sqrt(n));
    double chi2 = 0;  // 225 degrees of freedom: mean 225, standard deviation 21
    for (int b : bins) chi2 += (b - n / 256.) * (b - n / 256.) / (n / 256.);
    EXPECT_LT(chi2, 225 + 5 * 21.2);
    EXPECT_GT(chi2, 225 - 5 * 21.2);
  }
}

TEST(Permutation, SeedAndEpochChangeIt) {
  const auto list = [](uint64_t seed, uint64_t epoch) {
    std::vector<int64_t> v;
    for (int64_t i = 0; i < 50; ++i) v.push_back(permuted_index(i, 50, seed, epoch));
    return v;
  };
  EXPECT_EQ(list(1, 2), list(1, 2));
  EXPECT_NE(list(1, 2), list(2, 2));
  EXPECT_NE(list(1, 2), list(1, 3));
  EXPECT_NE(list(1, 2), list(2, 1));
}

// The order of rows is part of a run's identity: a resumed run must meet the rows the old program would have.
TEST(Permutation, NeverChanges) {
  const std::vector<int64_t> golden = {333, 550, 598, 441, 344, 526, 532, 190};
  for (size_t i = 0; i < golden.size(); ++i) EXPECT_EQ(permuted_index(static_cast<int64_t>(i), 1000, 42, 3), golden[i]);
}

TEST(RowSampler, EveryEpochSeesEachRowOnce) {
  const RowSampler s(37, {.global_batch_size = 5, .shuffle = true, .seed = 9});
  std::vector<int> count(37);
  std::vector<int64_t> first_epoch, second_epoch;
  for (int64_t n = 0; n < 74; ++n) {
    const int64_t row = s.row(n / 5, n % 5);
    ++count[static_cast<size_t>(row)];
    (n < 37 ? first_epoch : second_epoch).push_back(row);
  }
  for (int c : count) EXPECT_EQ(c, 2);
  EXPECT_NE(first_epoch, second_epoch);
  EXPECT_EQ(s.epoch(0), 0);
  EXPECT_EQ(s.epoch(7), 0);  // numbers 35 to 39: begins in epoch 0
  EXPECT_EQ(s.epoch(8), 1);
}

TEST(RowSampler, FileOrderWithoutShuffle) {
  const RowSampler s(7, {.global_batch_size = 3, .shuffle = false, .seed = 9});
  for (int64_t n = 0; n < 21; ++n) EXPECT_EQ(s.row(n / 3, n % 3), n % 7);
}

TEST(RowSampler, RefusesAnEmptyBatch) {
  EXPECT_CONTAINS(test::message_of<ConfigError>([] { RowSampler(7, {.global_batch_size = 0}); }), "below 1");
}

}  // namespace
}  // namespace kestrel
