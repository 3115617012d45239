#include <cmath>

#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer_cpu.h"

namespace kestrel::cpu {

// 28 bytes moved per parameter (p, m, v read and written, g read): bound by memory.
void adamw(const AdamW& h, int64_t n, float* p, const float* g, float* m, float* v, float grad_scale) {
  const double t = static_cast<double>(h.t);
  const float correct_m = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(h.beta1), t)));
  const float correct_v = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(h.beta2), t)));
  const float b1 = h.beta1, b2 = h.beta2, new1 = 1.f - b1, new2 = 1.f - b2;
  const float lr = h.lr, eps = h.eps, decay = h.weight_decay;
  constexpr int64_t kGrain = 1 << 14;
  parallel_pieces(n, kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float grad = grad_scale * g[i];
      m[i] = b1 * m[i] + new1 * grad;
      v[i] = b2 * v[i] + new2 * grad * grad;
      p[i] -= lr * (m[i] * correct_m / (std::sqrt(v[i] * correct_v) + eps) + decay * p[i]);
    }
  });
}

}  // namespace kestrel::cpu
