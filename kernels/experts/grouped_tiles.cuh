// From the device's offsets to tiles: which block computes which tile of which expert.
//
// Tiles are numbered expert by expert; block b takes tiles b, b + gridDim.x, ...  Blocks that run at the same time so
// work on few experts, whose weights stay in L2.  Inside an expert, tiles go down strips of kStrip block rows: the
// blocks of one moment share kStrip block rows of A and a few block columns of B.
//
// The number of a tile has no influence on its sums, so neither has the size of the grid.
#pragma once

#include <type_traits>

#include "kernels/core/cuda.h"
#include "kernels/experts/grouped_cuda.h"

namespace kestrel::cuda {

// f(std::integral_constant<Grouped, what>{}), for kernels that are templates on the product.
template <class F>
void with_product(Grouped what, F&& f) {
  switch (what) {
    case Grouped::forward:
      return f(std::integral_constant<Grouped, Grouped::forward>{});
    case Grouped::backward_input:
      return f(std::integral_constant<Grouped, Grouped::backward_input>{});
    case Grouped::backward_weight:
      return f(std::integral_constant<Grouped, Grouped::backward_weight>{});
  }
}

struct GroupedTile {
  int64_t begin, end;  // rows of the expert
  int expert, m, n;    // block row, block column
};

// The part of a problem that tiles follow from.
struct GroupedShape {
  const int64_t* offsets;
  int64_t experts, room, M, N;
};
inline GroupedShape shape_of(const GroupedProblem& p) {
  return {p.offsets, p.experts, p.room(), p.M, p.N};
}

template <Grouped what, int BM, int BN>
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const GroupedShape& s)
      : s_(s), n_tiles_(static_cast<uint32_t>((s.N + BN - 1) / BN)), next_(blockIdx.x) {
    end_ = bounded(0);
    enter(0);
  }

  // The block's next tile; false when there is none.  All threads that call it get the same answer.
  __device__ __forceinline__ bool next(GroupedTile& t) {
    while (next_ - before_ >= tiles_) {
      before_ += tiles_;
      if (expert_ + 1 >= s_.experts) return false;
      enter(expert_ + 1);
    }
    const uint32_t i = static_cast<uint32_t>(next_ - before_);
    next_ += gridDim.x;
    const uint32_t strip = i / (kStrip * n_tiles_), within = i - strip * (kStrip * n_tiles_);
    const uint32_t height = min(kStrip, m_tiles_ - strip * kStrip);
    t.begin = begin_, t.end = end_, t.expert = static_cast<int>(expert_);
    t.m = static_cast<int>(strip * kStrip + within % height);
    t.n = static_cast<int>(within / height);
    return true;
  }

 private:
  static constexpr uint32_t kStrip = 16;

  // Offsets beyond the buffer would be the caller's mistake; they lead to missing rows, not to foreign memory.
  __device__ __forceinline__ int64_t bounded(int64_t e) const { return min(__ldg(s_.offsets + e), s_.room); }

  __device__ __forceinline__ void enter(int64_t e) {
    expert_ = e;
    begin_ = end_;
    end_ = bounded(e + 1);
    if constexpr (what == Grouped::backward_weight) {
      m_tiles_ = end_ > begin_ ? static_cast<uint32_t>((s_.M + BM - 1) / BM) : 0;
    } else {
      m_tiles_ = static_cast<uint32_t>((end_ - begin_ + BM - 1) / BM);
    }
    tiles_ = int64_t{m_tiles_} * n_tiles_;
  }

  const GroupedShape s_;
  const uint32_t n_tiles_;
  int64_t next_, before_ = 0, tiles_ = 0, begin_ = 0, end_ = 0, expert_ = 0;
  uint32_t m_tiles_ = 0;
};

// Tiles there can be at most, whatever the offsets are.
inline int64_t most_tiles(const GroupedProblem& p, int64_t BM, int64_t BN) {
  const int64_t n = divide_up(p.N, BN);
  if (p.what == Grouped::backward_weight) return p.experts * divide_up(p.M, BM) * n;
  const int64_t experts = p.experts < p.room() ? p.experts : p.room();  // that have rows
  return (p.room() / BM + experts) * n;                                 // each has at most one ragged block row
}

// Blocks for a kernel of which each multiprocessor runs `each` at a time.
inline unsigned grouped_grid(const GroupedProblem& p, int64_t BM, int64_t BN, int64_t each) {
  const int64_t tiles = most_tiles(p, BM, BN), room = each * multiprocessors();
  return static_cast<unsigned>(tiles < room ? tiles : room);
}

}  // namespace kestrel::cuda
