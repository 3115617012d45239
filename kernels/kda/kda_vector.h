// Vectors of W floats, for the files that are compiled once per instruction set (kda_chains.h).  Everything is in an
// unnamed namespace and inline: no two of those files may share a function.
//
// Arrays of vectors stay in registers only if every function that sees them is inlined; functions with such arrays are
// marked flatten, which is that.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace kestrel::cpu::kda {
namespace {

#define X

// The unit of all arrays of a chunk: 16 rows of 16 floats.
constexpr int kBlock = 16;
constexpr int64_t kBlockSize = kBlock * kBlock;

template <int W>
struct Lanes {
  typedef float type __attribute__((vector_size(W * 4)));
  typedef int32_t mask __attribute__((vector_size(W * 4)));
};
template <int W>
using Vec = typename Lanes<W>::type;
template <int W>
using Mask = typename Lanes<W>::mask;

// f(0), f(1), ... f(N - 1), each index a constant: a loop over registers.
template <class F, int... i>
[[gnu::always_inline]] inline void repeat_for(std::integer_sequence<int, i...>, F&& f) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void repeat(F&& f) {
  repeat_for(std::make_integer_sequence<int, N>{}, f);
}

// Through memcpy: any address will do.
template <int W>
[[gnu::always_inline]] inline Vec<W> load(const float* p) {
  Vec<W> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <int W>
[[gnu::always_inline]] inline void store(float* p, Vec<W> x) {
  std::memcpy(p, &x, sizeof x);
}

template <int W>
[[gnu::always_inline]] inline Vec<W> splat(float x) {
  return Vec<W>{} + x;
}

// Index of each lane.
template <int W>
[[gnu::always_inline]] inline Mask<W> lane_index() {
  if constexpr (W == 16) {
    return Mask<W>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  } else {
    return Mask<W>{0, 1, 2, 3, 4, 5, 6, 7};
  }
}

template <int W>
[[gnu::always_inline]] inline float sum_of_lanes(Vec<W> x) {
  if constexpr (W == 16) {
    return sum_of_lanes<8>(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  } else {
    const auto four = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
    const auto two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
    return two[0] + two[1];
  }
}

// e^x for -87 <= x <= 0, NaN for NaN.  As exp_f of the core, without what such an argument cannot need: the exponent is
// read off the sum with 1.5 2^23.  The polynomial is summed in pairs, for it is the length of the chain that costs.
template <int W>
[[gnu::always_inline]] inline Vec<W> exp_in_range(Vec<W> x) {
  constexpr float kRound = 12582912.f;
  const Vec<W> shifted = x * 1.44269504f + kRound;
  const Vec<W> n = shifted - kRound;
  const Vec<W> r = (x - n * 0.693145752f) - n * 1.42860677e-6f, r2 = r * r;
  const Vec<W> p01 = r + 1.f, p23 = r * (1.f / 6.f) + 0.5f;
  const Vec<W> p45 = r * (1.f / 120.f) + 1.f / 24.f, p67 = r * (1.f / 5040.f) + 1.f / 720.f;
  const Vec<W> p = (p67 * r2 + p45) * (r2 * r2) + (p23 * r2 + p01);
  Mask<W> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);
  Vec<W> power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

constexpr float kLowestLog = -87.33654f;

// e^x for x <= 0; 0 below -87.3, where a float ends.
template <int W>
[[gnu::always_inline]] inline Vec<W> exp_of_negative(Vec<W> x) {
  const Mask<W> vanishes = x < kLowestLog;
  const Vec<W> y = exp_in_range<W>(vanishes ? splat<W>(kLowestLog) : x);
  return vanishes ? Vec<W>{} : y;
}

// log(1 + u) for u in [0, 1]: 2 atanh(y), y = u / (2 + u) <= 1/3; eight terms of the series leave 2e-9.
template <int W>
[[gnu::always_inline]] inline Vec<W> log_one_plus(Vec<W> u) {
  const Vec<W> y = u / (2.f + u), y2 = y * y;
  Vec<W> p = splat<W>(1.f / 15.f);
  p = p * y2 + 1.f / 13.f;
  p = p * y2 + 1.f / 11.f;
  p = p * y2 + 1.f / 9.f;
  p = p * y2 + 1.f / 7.f;
  p = p * y2 + 1.f / 5.f;
  p = p * y2 + 1.f / 3.f;
  p = p * y2 + 1.f;
  return 2.f * y * p;
}

// One step of a transpose: lanes of a and b whose index has bit `kBit` change places.
template <int W, int kBit, int... i>
[[gnu::always_inline]] inline void exchange(Vec<W>& a, Vec<W>& b, std::integer_sequence<int, i...>) {
  const Vec<W> low = __builtin_shufflevector(a, b, ((i & kBit) ? (i ^ kBit) + W : i)...);
  b = __builtin_shufflevector(a, b, ((i & kBit) ? i + W : i ^ kBit)...);
  a = low;
}

template <int W>
[[gnu::always_inline]] inline void transpose_registers(Vec<W> (&x)[W]) {
  const auto step = [&](auto bit) {
    constexpr int kBit = bit;
    repeat<W>([&](auto row) {
      constexpr int i = row;
      if constexpr ((i & kBit) == 0) exchange<W, kBit>(x[i], x[i | kBit], std::make_integer_sequence<int, W>{});
    });
  };
  step(std::integral_constant<int, 1>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 4>{});
  if constexpr (W == 16) step(std::integral_constant<int, 8>{});
}

// to = from^T, one block each.  `ld`: distance of the rows of `from`.
template <int W>
[[gnu::flatten]] inline void transpose_block(const float* from, int64_t ld, float* to) {
  for (int i0 = 0; i0 < kBlock; i0 += W) {
    for (int j0 = 0; j0 < kBlock; j0 += W) {
      Vec<W> x[W];
      repeat<W>([&](auto i) { x[i] = load<W>(from + (i0 + i) * ld + j0); });
      transpose_registers<W>(x);
      repeat<W>([&](auto i) { store<W>(to + (j0 + i) * kBlock + i0, x[i]); });
    }
  }
}

// sums[i] = sum of row i of a block.
template <int W>
inline void sum_rows(const float* block, float* sums) {
  float turned[kBlockSize];
  transpose_block<W>(block, kBlock, turned);
  for (int l = 0; l < kBlock; l += W) {
    Vec<W> sum = load<W>(turned + l);
    for (int j = 1; j < kBlock; ++j) sum += load<W>(turned + j * kBlock + l);
    store<W>(sums + l, sum);
  }
}

}  // namespace
}  // namespace kestrel::cpu::kda
