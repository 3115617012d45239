// Products of 16 x 16 blocks, summed in registers: what the chunk form of KDA is made of.  Included once per
// instruction set (kda_chains.h).
//
// A block is 16 rows of 16 floats, contiguous.  A matrix of 16 rows and 16 n columns is n blocks in a row; a matrix of
// R rows and 16 n columns is n panels of R rows of 16 (so the rows of a panel, 16 by 16, are blocks again).
//
// An element of a sum is one chain of fused multiply-adds over the depth, in order: its bits depend on its row of A and
// its column of B alone.
#pragma once

#include "kernels/kda/kda_vector.h"

namespace kestrel::cpu::kda {
namespace {

enum class As { plain, transposed };

// R rows by P panels of 16 columns, in registers.
template <int W, int R, int P>
struct Sums {
  static constexpr int kParts = kBlock / W;  // vectors of a row of a block
  Vec<W> at[R][P * kParts] = {};

  // += rows [0, R) of A times B, 16 deep.  a: a block (transposed: given by its transpose) from its first row (column)
  // to be used; b: 16 rows of the first panel, the next panel `panel` floats further.
  template <As as, int kSign = 1>
  [[gnu::always_inline]] inline void add(const float* a, const float* b, int64_t panel) {
#pragma GCC unroll 4
    for (int k = 0; k < kBlock; ++k) {
      Vec<W> right[P * kParts];
      repeat<P * kParts>([&](auto c) { right[c] = load<W>(b + c / kParts * panel + k * kBlock + c % kParts * W); });
      repeat<R>([&](auto i) {
        const float left = as == As::plain ? a[i * kBlock + k] : a[k * kBlock + i];
        repeat<P * kParts>([&](auto c) {
          if constexpr (kSign > 0) {
            at[i][c] += left * right[c];
          } else {
            at[i][c] -= left * right[c];
          }
        });
      });
    }
  }
  template <As as>
  [[gnu::always_inline]] inline void subtract(const float* a, const float* b, int64_t panel) {
    add<as, -1>(a, b, panel);
  }

  // f(row, panel, column of the panel, vector) for every vector of the sums.
  template <class F>
  [[gnu::always_inline]] inline void each(F&& f) {
    repeat<R>([&](auto i) { repeat<P * kParts>([&](auto c) { f(i, c / kParts, c % kParts * W, at[i][c]); }); });
  }
};

// How many rows make full use of the registers beside P panels of columns.
template <int W, int P>
constexpr int kRowsFor = W == 16 ? (P == 1   ? 16
                                    : P == 2 ? 8
                                             : 4)
                                 : (P == 1 ? 4 : 2);

// f(constant P, first panel) over `panels` panels, as wide as the registers allow.
template <int W, class F>
[[gnu::always_inline]] inline void for_panels(int64_t panels, F&& f) {
  int64_t p = 0;
  if constexpr (W == 16) {
    for (; p + 4 <= panels; p += 4) f(std::integral_constant<int, 4>{}, p);
    if (p + 2 <= panels) {
      f(std::integral_constant<int, 2>{}, p);
      p += 2;
    }
  }
  for (; p < panels; ++p) f(std::integral_constant<int, 1>{}, p);
}

// f(sums, first row) over the 16 rows of a block and P panels.
template <int W, int P, class F>
[[gnu::always_inline]] inline void for_rows(F&& f) {
  constexpr int R = kRowsFor<W, P>;
  for (int i = 0; i < kBlock; i += R) {
    Sums<W, R, P> sums;
    f(sums, i);
  }
}

}  // namespace
}  // namespace kestrel::cpu::kda
