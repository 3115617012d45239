// The products for AVX-512, compiled into every x86 program and used where the machine has it.
#include "kernels/kda/kda_products_wide.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__GNUC__) && !defined(__clang__)
#include <cstring>
#include <type_traits>

#include "kernels/kda/kda_products.h"

// From here on the compiler may use AVX-512: nothing below may be reached on a machine without it.
#pragma GCC target("avx512f,avx512vl,prefer-vector-width=512")
#include "kernels/kda/kda_products_blocks.h"

namespace kestrel::cpu::kda {
namespace {

void multiply_avx512(Into how, int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb, float* c,
                     int64_t ldc) {
  const Sizes n{rows, cols, depth};
  with_constant(how, [&](auto constant) {
    constexpr Into into = decltype(constant)::value;
    int64_t j = 0;
    strips<into, 16, 4, 4>(j, n, a, b, ldb, c, ldc);
    strips<into, 16, 8, 2>(j, n, a, b, ldb, c, ldc);
    strips<into, 16, 8, 1>(j, n, a, b, ldb, c, ldc);
    strips<into, 8, 8, 1>(j, n, a, b, ldb, c, ldc);
  });
}

}  // namespace

Multiply* multiply_for_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") ? multiply_avx512 : nullptr;
}

}  // namespace kestrel::cpu::kda

#else

namespace kestrel::cpu::kda {
Multiply* multiply_for_avx512() {
  return nullptr;
}
}  // namespace kestrel::cpu::kda

#endif
