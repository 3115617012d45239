#include <algorithm>
#include <array>

#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer_cpu.h"

namespace kestrel::cpu {

// No finite float's square leaves the range of fp64, so the sum is finite exactly when every element is.
double sum_of_squares(int64_t n, const float* x) {
  constexpr int64_t kPieces = 256, kSmallest = 1 << 14;
  const int64_t grain = std::max(kSmallest, (n + kPieces - 1) / kPieces);
  std::array<double, kPieces> piece{};
  parallel_pieces(n, grain, [&](int64_t begin, int64_t end) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    piece[static_cast<size_t>(begin / grain)] = sum;
  });
  double total = 0;
  for (const double sum : piece) total += sum;
  return total;
}

void scale_rows(int64_t rows, int64_t cols, float* x, int64_t ld, float factor) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) x[r * ld + c] *= factor;
  }
}

}  // namespace kestrel::cpu
