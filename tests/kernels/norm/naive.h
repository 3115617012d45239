// Float64 company for the tests of small operations: values of a tensor as doubles, central differences of a plain
// fp64 form, bitwise comparison, and runs under different thread counts.
#pragma once

#include <omp.h>

#include <bit>
#include <functional>

#include "tests/support.h"

namespace kestrel::test {

using Doubles = std::vector<double>;

inline Doubles doubles(const Tensor& t) {
  Doubles v;
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) v.push_back(t.f32()[r * t.ld + c]);
  }
  return v;
}

// d loss / dx by central differences.  In fp64 with a step of 1e-5 the error is about 1e-10 of the function's scale,
// far below fp32 rounding.
inline Doubles differences(Doubles& x, const std::function<double()>& loss) {
  constexpr double step = 1e-5;
  Doubles g(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double up = loss();
    x[i] = at - step;
    const double down = loss();
    x[i] = at;
    g[i] = (up - down) / (2 * step);
  }
  return g;
}

inline double inner(const Doubles& a, const Doubles& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline double relative_error(const Doubles& a, const Doubles& b) {
  EXPECT_EQ(a.size(), b.size());
  double d = 0, n = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    d += (a[i] - b[i]) * (a[i] - b[i]);
    n += b[i] * b[i];
  }
  return n > 0 ? std::sqrt(d / n) : std::sqrt(d);
}
inline double relative_error(const Tensor& a, const Doubles& b) {
  return relative_error(doubles(a), b);
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.rows() != b.rows() || a.cols() != b.cols()) return false;
  const size_t row = static_cast<size_t>(a.cols()) * sizeof(float);
  for (int64_t r = 0; r < a.rows(); ++r) {
    if (std::memcmp(a.f32() + r * a.ld, b.f32() + r * b.ld, row) != 0) return false;
  }
  return true;
}

inline bool all_finite(const Tensor& t) {
  for (double x : doubles(t)) {
    if (!std::isfinite(x)) return false;
  }
  return true;
}

template <class F>
void with_threads(int count, F&& run) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(count);
  run();
  omp_set_num_threads(before);
}

// Columns [first, first + cols) of an owned matrix [rows, width]: a tensor with ld > cols whose neighbours are
// poisoned.  `untouched` says whether every neighbour still is.
class Block {
 public:
  Block(int64_t rows, int64_t cols, int64_t first = 3, int64_t after = 2)
      : whole_({rows, first + cols + after}), first_(first), cols_(cols) {}
  operator Tensor() const { return whole_->columns(first_, cols_); }
  Tensor operator*() const { return whole_->columns(first_, cols_); }
  Block& copy(const Tensor& from) {
    const Tensor to = **this;
    EXPECT_EQ(to.numel(), from.numel());
    for (int64_t r = 0; r < to.rows(); ++r) {
      for (int64_t c = 0; c < cols_; ++c) to.f32()[r * to.ld + c] = from.f32()[r * from.ld + c];
    }
    return *this;
  }
  bool untouched() const {
    for (int64_t r = 0; r < whole_->rows(); ++r) {
      for (int64_t c = 0; c < whole_->cols(); ++c) {
        const bool neighbour = c < first_ || c >= first_ + cols_;
        if (neighbour && std::bit_cast<uint32_t>(whole_.f()[r * whole_->ld + c]) != 0xffffffffu) return false;
      }
    }
    return true;
  }

 private:
  Buffer whole_;
  int64_t first_, cols_;
};

}  // namespace kestrel::test
