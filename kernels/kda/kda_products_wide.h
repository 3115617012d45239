// The choice between instruction sets behind `multiply`.
#pragma once

#include "kernels/kda/kda_products.h"

namespace kestrel::cpu::kda {

using Multiply = void(Into how, int64_t rows, int64_t cols, int64_t depth, Left a, const float* b, int64_t ldb,
                      float* c, int64_t ldc);
Multiply* multiply_for_avx512();  // nullptr when the compiler or this machine has no AVX-512

}  // namespace kestrel::cpu::kda
