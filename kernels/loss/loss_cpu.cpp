#include "kernels/loss/loss_cpu.h"

#include <cmath>

#include "kernels/core/math.h"
#include "kernels/core/parallel.h"
#include "kernels/gemm/gemm.h"

namespace kestrel::cpu {
namespace {

float row_max(const float* z, int64_t V) {
  float m = z[0];
#pragma omp simd reduction(max : m)
  for (int64_t i = 1; i < V; ++i) m = z[i] > m ? z[i] : m;
  return m;
}

// Columns summed in fp32 before the partial sum joins an fp64 total: the error does not grow with the vocabulary.
constexpr int64_t kSumBlock = 1024;

// sum_i e^(z_i - m); with `out` the terms are kept there (out may be z).
double sum_exp(float* out, const float* z, int64_t V, float m) {
  double total = 0;
  for (int64_t first = 0; first < V; first += kSumBlock) {
    const int64_t end = std::min(V, first + kSumBlock);
    float sum = 0.f;
    if (out == nullptr) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = first; i < end; ++i) sum += exp_f(z[i] - m);
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = first; i < end; ++i) {
        out[i] = exp_f(z[i] - m);
        sum += out[i];
      }
    }
    total += sum;
  }
  return total;
}

// One row; returns its loss.  d may be null or z.
float row_loss(float* d, const float* z, int64_t V, int32_t target, float grad_scale) {
  if (target == kIgnoreTarget) {
    if (d != nullptr) std::fill(d, d + V, 0.f);
    return 0.f;
  }
  const float m = row_max(z, V), z_target = z[target];
  const double sum = sum_exp(d, z, V, m);
  if (d != nullptr) {
    const float factor = static_cast<float>(grad_scale / sum);
    for (int64_t i = 0; i < V; ++i) d[i] *= factor;
    d[target] -= grad_scale;
  }
  return static_cast<float>(std::log(sum) + (static_cast<double>(m) - static_cast<double>(z_target)));
}

}  // namespace

void check_targets(const int32_t* targets, int64_t N, int64_t V) {
  for (int64_t n = 0; n < N; ++n) {
    if ((targets[n] >= 0 && targets[n] < V) || targets[n] == kIgnoreTarget) continue;
    throw DataError(text("target ", targets[n], " at position ", n, " of the batch is outside the vocabulary of ", V,
                         " tokens (or ", kIgnoreTarget,
                         " for a position without loss). The data was made with another ",
                         "tokenizer than the model's vocab_size says: rebuild one or the other."));
  }
}

void cross_entropy(int64_t N, int64_t V, float* losses, float* dlogits, int64_t ldd, const float* logits, int64_t ldz,
                   const int32_t* targets, float grad_scale) {
  parallel_for(N, [&](int64_t n) {
    float* d = dlogits == nullptr ? nullptr : dlogits + n * ldd;
    losses[n] = row_loss(d, logits + n * ldz, V, targets[n], grad_scale);
  });
}

void linear_cross_entropy(Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets, float grad_scale,
                          Tensor block) {
  const int64_t N = x.rows(), D = x.cols(), V = w.rows();
  const bool backward = dx || dw;
  check_targets(targets.i32(), N, V);
  float* z = block.f32();
  for (int64_t first = 0; first < N; first += block.rows()) {
    const int64_t n = std::min(block.rows(), N - first);
    const float* x_rows = x.f32() + first * x.ld;
    sgemm(Trans::no, Trans::yes, n, V, D, 1.f, x_rows, x.ld, w.f32(), w.ld, 0.f, z, V);
    cross_entropy(n, V, losses.f32() + first, backward ? z : nullptr, V, z, V, targets.i32() + first, grad_scale);
    if (dx) sgemm(Trans::no, Trans::no, n, D, V, 1.f, z, V, w.f32(), w.ld, 0.f, dx.f32() + first * dx.ld, dx.ld);
    if (dw) sgemm(Trans::yes, Trans::no, V, D, n, 1.f, z, V, x_rows, x.ld, 1.f, dw.f32(), dw.ld);
  }
}

}  // namespace kestrel::cpu
