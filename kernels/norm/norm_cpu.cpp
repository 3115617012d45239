#include "kernels/norm/norm_cpu.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/math.h"
#include "kernels/norm/rows.h"

namespace kestrel::cpu {
namespace {

// The loops over a row are not inlined: parallel_for holds its body twice, serial and threaded, and two copies of the
// same arithmetic may be contracted into different fused multiply-adds.  One copy has the same bits for any number of
// threads and in every operation that uses it.

[[gnu::noinline]] float dot(const float* x, const float* y, int64_t n) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c];
  return sum;
}

[[gnu::noinline]] float dot3(const float* x, const float* y, const float* z, int64_t n) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c] * z[c];
  return sum;
}

float* zeroed_piece(float* partial, int64_t first_row, int64_t cols) {
  float* p = partial + first_row / kRowsPerPiece * cols;
  std::fill_n(p, cols, 0.f);
  return p;
}

[[gnu::noinline]] void gated_row(float* y, const float* x, const float* gate, const float* w, float r, int64_t K) {
#pragma omp simd
  for (int64_t c = 0; c < K; ++c) y[c] = w[c] * (x[c] * r) * sigmoid_f(gate[c]);
}

// dx first holds u = w dy sigmoid(gate), whose product with x is needed before any element of dx is known.
[[gnu::noinline]] void gated_backward_row(float* dx, float* dgate, float* dw, const float* dy, const float* x,
                                          const float* gate, const float* w, float r, int64_t K) {
  float ux = 0.f;
#pragma omp simd reduction(+ : ux)
  for (int64_t c = 0; c < K; ++c) {
    const float sg = sigmoid_f(gate[c]), sg_minus = sigmoid_f(-gate[c]);  // 1 - sg without cancellation
    const float d = dy[c], n = x[c] * r, dn = d * sg, u = w[c] * dn;
    dw[c] += dn * n;
    dgate[c] = d * w[c] * n * sg * sg_minus;
    dx[c] = u;
    ux += u * x[c];
  }
  const float k = r * r * r * (ux / static_cast<float>(K));
#pragma omp simd
  for (int64_t c = 0; c < K; ++c) dx[c] = r * dx[c] - k * x[c];
}

// dx = rho (dy - k x)
[[gnu::noinline]] void l2_backward_row(float* dx, const float* dy, const float* x, float rho, float k, int64_t D) {
#pragma omp simd
  for (int64_t c = 0; c < D; ++c) dx[c] = rho * (dy[c] - k * x[c]);
}

float l2_rho(const float* x, int64_t D, float eps) {
  return 1.f / std::sqrt(dot(x, x, D) + eps);
}

}  // namespace

[[gnu::noinline]] float rms_rstd(const float* x, int64_t D, float eps) {
  return 1.f / std::sqrt(dot(x, x, D) / static_cast<float>(D) + eps);
}

[[gnu::noinline]] void scale_row(float* y, const float* x, const float* w, float r, int64_t D) {
#pragma omp simd
  for (int64_t c = 0; c < D; ++c) y[c] = w[c] * (x[c] * r);
}

[[gnu::noinline]] void rms_norm_backward_row(float* dx, float* dw, const float* dy, const float* x, const float* w,
                                             float r, int64_t D, bool add) {
  const float k = r * r * r * (dot3(w, dy, x, D) / static_cast<float>(D));
  if (add) {
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) {
      dw[c] += dy[c] * (x[c] * r);
      dx[c] += r * (w[c] * dy[c]) - k * x[c];
    }
  } else {
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) {
      const float d = dy[c];
      dw[c] += d * (x[c] * r);
      dx[c] = r * (w[c] * d) - k * x[c];
    }
  }
}

void rms_norm_forward(const Tensor& y, float* rstd, const Tensor& x, const float* w, float eps) {
  const Rows out(y), in(x);
  const int64_t D = x.cols();
  parallel_for(x.rows(), [&](int64_t n) {
    rstd[n] = rms_rstd(in[n], D, eps);
    scale_row(out[n], in[n], w, rstd[n], D);
  });
}

void rms_norm_backward(const Tensor& dx, float* dw, const Tensor& dy, const Tensor& x, const float* w,
                       const float* rstd, bool add, float* partial) {
  const Rows d_in(dx), d_out(dy), in(x);
  const int64_t N = x.rows(), D = x.cols();
  parallel_pieces(N, kRowsPerPiece, [&](int64_t first, int64_t last) {
    float* dw_piece = zeroed_piece(partial, first, D);
    for (int64_t n = first; n < last; ++n) {
      rms_norm_backward_row(d_in[n], dw_piece, d_out[n], in[n], w, rstd[n], D, add);
    }
  });
  add_pieces(dw, partial, row_pieces(N), D, D);
}

void gated_rms_norm_forward(const Tensor& y, float* rstd, const Tensor& x, const Tensor& gate, const float* w,
                            int64_t K, float eps) {
  const Rows out(y), in(x), g(gate);
  const int64_t H = x.cols() / K;
  parallel_for(x.rows(), [&](int64_t n) {
    for (int64_t h = 0; h < H; ++h) {
      const float r = rms_rstd(in[n] + h * K, K, eps);
      rstd[n * H + h] = r;
      gated_row(out[n] + h * K, in[n] + h * K, g[n] + h * K, w, r, K);
    }
  });
}

void gated_rms_norm_backward(const Tensor& dx, const Tensor& dgate, float* dw, const Tensor& dy, const Tensor& x,
                             const Tensor& gate, const float* w, const float* rstd, int64_t K, float* partial) {
  const Rows d_in(dx), d_g(dgate), d_out(dy), in(x), g(gate);
  const int64_t N = x.rows(), H = x.cols() / K;
  parallel_pieces(N, kRowsPerPiece, [&](int64_t first, int64_t last) {
    float* dw_piece = zeroed_piece(partial, first, K);
    for (int64_t n = first; n < last; ++n) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t c = h * K;
        gated_backward_row(d_in[n] + c, d_g[n] + c, dw_piece, d_out[n] + c, in[n] + c, g[n] + c, w, rstd[n * H + h], K);
      }
    }
  });
  add_pieces(dw, partial, row_pieces(N), K, K);
}

void l2_norm_forward(const Tensor& y, const Tensor& x, float eps) {
  const Rows out(y), in(x);
  const int64_t D = x.cols();
  parallel_for(x.rows(), [&](int64_t n) {
    const float rho = l2_rho(in[n], D, eps);
    const float* from = in[n];
    float* to = out[n];
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) to[c] = from[c] * rho;
  });
}

void l2_norm_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, float eps) {
  const Rows d_in(dx), d_out(dy), in(x);
  const int64_t D = x.cols();
  parallel_for(x.rows(), [&](int64_t n) {
    const float rho = l2_rho(in[n], D, eps);
    const float k = rho * rho * dot(in[n], d_out[n], D);
    l2_backward_row(d_in[n], d_out[n], in[n], rho, k, D);
  });
}

}  // namespace kestrel::cpu
