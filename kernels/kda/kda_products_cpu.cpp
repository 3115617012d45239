// The products for the instruction set the program is compiled for.
#include "kernels/kda/kda_products_blocks.h"
#include "kernels/kda/kda_products_wide.h"

namespace kestrel::cpu::kda {
namespace {

void multiply_base(Into how, int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
                   int64_t ldc) {
  const Sizes n{rows, cols, depth};
  with_constant(how, [&](auto constant) {
    constexpr Into into = decltype(constant)::value;
    int64_t j = 0;
    strips<into, 8, 4, 3>(j, n, a, b, ldb, c, ldc);
    strips<into, 8, 4, 2>(j, n, a, b, ldb, c, ldc);
    strips<into, 8, 8, 1>(j, n, a, b, ldb, c, ldc);
  });
}

}  // namespace

void multiply(Into how, int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
              int64_t ldc) {
  static Multiply* const best = multiply_for_avx512() != nullptr ? multiply_for_avx512() : multiply_base;
  best(how, rows, cols, depth, a, b, ldb, c, ldc);
}

}  // namespace kestrel::cpu::kda
