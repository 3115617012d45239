#include "kernels/gemm/own_gemm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "kernels/core/parallel.h"
#include "kernels/gemm/pack.h"

namespace kestrel::cpu {
namespace {

// Blocking (README): kDepth is the only one that bits depend on.
constexpr int64_t kDepth = 256;    // k of a packed panel: a panel of B (up to 32 columns) stays in L1
constexpr int64_t kRows = 192;     // rows of a packed block of A: 192 KiB of L2
constexpr int64_t kCols = 2048;    // columns of a packed block of B: 2 MiB of L3
constexpr int64_t kDirect = 8192;  // floats a panel may span in place before packing pays: L1

// Below this many multiply-adds waking the other threads costs more than it saves.
constexpr int64_t kParallelWork = int64_t{1} << 19;

// Few rows against transposed B: dot products, which read B in place and once.
constexpr int64_t kDotRows = 2;

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};

// Packing space of one thread; grows to what the blocking asks for and stays.
class Scratch {
 public:
  float* get(int64_t n) {
    if (n > size_) {
      memory_.reset(
          static_cast<float*>(::operator new[](static_cast<size_t>(n) * sizeof(float), std::align_val_t(64))));
      size_ = n;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float[], AlignedDelete> memory_;
  int64_t size_ = 0;
};

// An operand as (pointer, stride along its own dimension of C, stride along k).
struct Operand {
  const float* data;
  int64_t own, k;
  Operand at(int64_t i, int64_t kk) const { return {data + i * own + kk * k, own, k}; }
};

Operand operand_a(const Product& p) {
  return p.ta == Trans::no ? Operand{p.A, p.lda, 1} : Operand{p.A, 1, p.lda};
}
Operand operand_b(const Product& p) {
  return p.tb == Trans::no ? Operand{p.B, 1, p.ldb} : Operand{p.B, p.ldb, 1};
}

void scale_c(const Product& p) {
  for (int64_t i = 0; i < p.M; ++i) {
    float* c = p.C + i * p.ldc;
    if (p.beta == 0.f) {
      std::fill(c, c + p.N, 0.f);
    } else {
      for (int64_t j = 0; j < p.N; ++j) c[j] *= p.beta;
    }
  }
}

// Uses of the shape only, so that every way to cut C takes the same path.
bool takes_dots(const Product& p) {
  return p.ta == Trans::no && p.tb == Trans::yes && p.M <= kDotRows;
}

void dots(const MicroKernels& set, const Product& p) {
  for (int64_t j = 0; j < p.N; ++j) {
    for (int64_t i = 0; i < p.M; ++i) {
      const float sum = set.dot(p.K, p.A + i * p.lda, p.B + j * p.ldb);
      float& c = p.C[i * p.ldc + j];
      c = p.beta == 0.f ? p.alpha * sum : std::fma(p.alpha, sum, p.beta * c);
    }
  }
}

// A block of C [m, n] over one block of k, operands packed unless they are read in place.
class Block {
 public:
  Block(const MicroKernels& set, const Product& p)
      : set_(set), p_(p), a_(operand_a(p)), b_(operand_b(p)), depth_most_(std::min(p.K, kDepth)) {
    // In place when it is used once or twice, or when what a panel spans stays in L1 anyway.
    a_in_place_ = p.N <= set.cols || span(p.ta == Trans::no, p.M, p.lda) <= kDirect;
    b_in_place_ = p.tb == Trans::no && (p.M <= set.rows || span(false, p.N, p.ldb) <= kDirect);
    // A panel narrower than its vectors is packed with zeros behind it.
    const int64_t ragged = p.N % (set.cols / 2) == 0 ? 0 : set.cols;
    const int64_t wide = std::min(kCols, (p.N + set.cols - 1) / set.cols * set.cols);
    const int64_t b_floats = (b_in_place_ ? ragged : wide) * depth_most_;
    const int64_t a_floats = a_in_place_ ? 0 : std::min(kRows, p.M) * depth_most_;
    if (a_floats + b_floats > 0) {
      thread_local Scratch scratch;
      packed_b_ = scratch.get((b_floats + 15) / 16 * 16 + a_floats);
      packed_a_ = packed_b_ + (b_floats + 15) / 16 * 16;
    }
  }

  void run() {
    for (int64_t jc = 0; jc < p_.N; jc += kCols) {
      const int64_t n = std::min(kCols, p_.N - jc);
      for (int64_t kc = 0; kc < p_.K; kc += kDepth) {
        const int64_t depth = std::min(kDepth, p_.K - kc);
        pack_b(jc, n, kc, depth);
        for (int64_t ic = 0; ic < p_.M; ic += kRows) {
          const int64_t m = std::min(kRows, p_.M - ic);
          pack_a(ic, m, kc, depth);
          tiles(ic, m, jc, n, kc, depth);
        }
      }
    }
  }

 private:
  int64_t span(bool rows_own, int64_t own, int64_t ld) const { return (rows_own ? own : depth_most_) * ld; }

  // Panel j of B starts at packed_b_ + j * depth: panels before it are all of full width.
  void pack_b(int64_t jc, int64_t n, int64_t kc, int64_t depth) {
    for (int64_t j = 0; j < n; j += set_.cols) {
      const int cols = static_cast<int>(std::min<int64_t>(set_.cols, n - j)), width = set_.panel_width(cols);
      if (b_in_place_ && cols == width) continue;
      const Operand b = b_.at(jc + j, kc);
      pack_panel(packed_b_ + (b_in_place_ ? 0 : j * depth), width, cols, depth, b.data, b.own, b.k);
    }
  }
  void pack_a(int64_t ic, int64_t m, int64_t kc, int64_t depth) {
    if (a_in_place_) return;
    for (int64_t i = 0; i < m; i += set_.rows) {
      const int rows = static_cast<int>(std::min<int64_t>(set_.rows, m - i));
      const Operand a = a_.at(ic + i, kc);
      pack_panel(packed_a_ + i * depth, rows, rows, depth, a.data, a.own, a.k);
    }
  }
  void tiles(int64_t ic, int64_t m, int64_t jc, int64_t n, int64_t kc, int64_t depth) {
    const float beta = kc == 0 ? p_.beta : 1.f;
    for (int64_t j = 0; j < n; j += set_.cols) {
      const int cols = static_cast<int>(std::min<int64_t>(set_.cols, n - j)), width = set_.panel_width(cols);
      TileB b{packed_b_ + j * depth, width};
      if (b_in_place_) b = cols == width ? TileB{b_.at(jc + j, kc).data, b_.k} : TileB{packed_b_, width};
      for (int64_t i = 0; i < m; i += set_.rows) {
        const int rows = static_cast<int>(std::min<int64_t>(set_.rows, m - i));
        TileA a{packed_a_ + i * depth, 1, rows};
        if (a_in_place_) a = {a_.at(ic + i, kc).data, a_.own, a_.k};
        set_.tile(rows, cols, depth, a, b, p_.alpha, beta, p_.C + (ic + i) * p_.ldc + jc + j, p_.ldc);
      }
    }
  }

  const MicroKernels& set_;
  const Product& p_;
  Operand a_, b_;
  int64_t depth_most_;
  bool a_in_place_ = false, b_in_place_ = false;
  float *packed_a_ = nullptr, *packed_b_ = nullptr;
};

// The product of a part of C, by the path chosen for the whole.
void part(const MicroKernels& set, const Product& p, bool by_dots) {
  if (p.M <= 0 || p.N <= 0) return;
  if (p.K <= 0 || p.alpha == 0.f) {
    scale_c(p);
  } else if (by_dots) {
    dots(set, p);
  } else {
    Block(set, p).run();
  }
}

Product cut(const Product& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  Product q = p;
  q.M = i1 - i0;
  q.N = j1 - j0;
  q.A = operand_a(p).at(i0, 0).data;
  q.B = operand_b(p).at(j0, 0).data;
  q.C = p.C + i0 * p.ldc + j0;
  return q;
}

int64_t ceil_to(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

struct Grid {
  int64_t rows, cols;  // of one block of C
};

// One block per thread, as square as the packing (both operands once per block) wants it.
Grid grid_for(const MicroKernels& set, const Product& p, int64_t threads) {
  constexpr int64_t kPackCost = 16;  // multiply-adds that one packed element costs, roughly
  Grid best{p.M, p.N};
  int64_t least = INT64_MAX;
  for (int64_t down = 1; down <= threads; ++down) {
    const int64_t across = threads / down;
    const Grid g{ceil_to((p.M + down - 1) / down, set.rows), ceil_to((p.N + across - 1) / across, set.cols)};
    const int64_t cost = g.rows * g.cols + kPackCost * (g.rows + g.cols);
    if (cost < least) {
      least = cost;
      best = g;
    }
  }
  return best;
}

}  // namespace

void own_serial(const MicroKernels& set, const Product& p) {
  part(set, p, takes_dots(p));
}

void own_parallel(const MicroKernels& set, const Product& p) {
  const int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads == 1 || p.M * p.N * std::max<int64_t>(p.K, 1) < kParallelWork) return own_serial(set, p);
  const bool by_dots = takes_dots(p);
  const Grid g = grid_for(set, p, threads);
  const int64_t down = (p.M + g.rows - 1) / g.rows, across = (p.N + g.cols - 1) / g.cols;
  parallel_for(down * across, [&](int64_t t) {
    const int64_t i = t / across * g.rows, j = t % across * g.cols;
    part(set, cut(p, i, std::min(p.M, i + g.rows), j, std::min(p.N, j + g.cols)), by_dots);
  });
}

}  // namespace kestrel::cpu
