#include "kernels/attn_res/attn_res_cpu.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/math.h"
#include "kernels/norm/norm_cpu.h"
#include "kernels/norm/rows.h"

namespace kestrel::cpu {
namespace {

// Everything is done token by token: the S rows of a token are read once from memory and again from cache.
//
// The row kernels are not inlined, so that there is one copy of their arithmetic: forward and recompute, and serial and
// threaded loops, run the same instructions and give the same bits.

std::vector<Rows> rows_of(const std::vector<Tensor>& v) {
  return {v.begin(), v.end()};
}

// alpha and r of one token.
[[gnu::noinline]] void mix_weights(float* alpha, float* rstd, const std::vector<Rows>& sources, int64_t n,
                                   const float* u, int64_t D, float eps) {
  const size_t S = sources.size();
  float highest = -HUGE_VALF;
  for (size_t j = 0; j < S; ++j) {
    const float* v = sources[j][n];
    float squares = 0.f, score = 0.f;
#pragma omp simd reduction(+ : squares, score)
    for (int64_t c = 0; c < D; ++c) {
      squares += v[c] * v[c];
      score += u[c] * v[c];
    }
    rstd[j] = 1.f / std::sqrt(squares / static_cast<float>(D) + eps);
    alpha[j] = rstd[j] * score;
    highest = std::max(highest, alpha[j]);
  }
  float sum = 0.f;
  for (size_t j = 0; j < S; ++j) sum += alpha[j] = exp_f(alpha[j] - highest);
  for (size_t j = 0; j < S; ++j) alpha[j] /= sum;
}

// h = sum_j alpha_j v_j.
[[gnu::noinline]] void mix_row(float* h, const std::vector<Rows>& sources, int64_t n, const float* alpha, int64_t D) {
  const float *first = sources[0][n], a0 = alpha[0];
#pragma omp simd
  for (int64_t c = 0; c < D; ++c) h[c] = a0 * first[c];
  for (size_t j = 1; j < sources.size(); ++j) {
    const float *v = sources[j][n], a = alpha[j];
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) h[c] += a * v[c];
  }
}

// Adds one token's part to the source gradients and to du; b, l [S] are scratch.
[[gnu::noinline]] void mix_backward_row(const std::vector<Rows>& dsources, float* du, float* b, float* l,
                                        const float* dh, const std::vector<Rows>& sources, int64_t n,
                                        const float* alpha, const float* rstd, const float* u, int64_t D) {
  const size_t S = sources.size();
  float delta = 0.f;
  for (size_t j = 0; j < S; ++j) {
    const float* v = sources[j][n];
    float grad = 0.f, score = 0.f;
#pragma omp simd reduction(+ : grad, score)
    for (int64_t c = 0; c < D; ++c) {
      grad += dh[c] * v[c];
      score += u[c] * v[c];
    }
    b[j] = grad;
    l[j] = rstd[j] * score;
    delta += alpha[j] * grad;
  }
  for (size_t j = 0; j < S; ++j) {
    const float* v = sources[j][n];
    float* dv = dsources[j][n];
    const float a = alpha[j];
    const float k = a * (b[j] - delta) * rstd[j];                // dl_j r_j
    const float m = k * l[j] * rstd[j] / static_cast<float>(D);  // dl_j r_j l_j r_j / D
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) {
      dv[c] += a * dh[c] + (k * u[c] - m * v[c]);
      du[c] += k * v[c];
    }
  }
}

}  // namespace

void fold_query(float* u, const float* norm_weight, const float* query, int64_t D) {
  for (int64_t c = 0; c < D; ++c) u[c] = norm_weight[c] * query[c];
}

void unfold_query(float* dnorm_weight, float* dquery, const float* norm_weight, const float* query, int64_t D,
                  const Tensor& scratch, float* total) {
  std::fill_n(total, D, 0.f);
  add_pieces(total, scratch.f32(), scratch.rows(), scratch.ld, D);
  for (int64_t c = 0; c < D; ++c) {
    dnorm_weight[c] += query[c] * total[c];
    dquery[c] += norm_weight[c] * total[c];
  }
}

void attn_res_forward(const Mix& mix, const Tensor& y, float eps) {
  const std::vector<Rows> sources = rows_of(mix.sources);
  const Rows out(y), alpha(mix.alpha), rstd(mix.rstd);
  const int64_t D = y.cols();
  parallel_for(y.rows(), [&](int64_t n) {
    mix_weights(alpha[n], rstd[n], sources, n, mix.u, D, eps);
    mix_row(out[n], sources, n, alpha[n], D);
  });
}

void attn_res_backward(const Mix& mix, const std::vector<Tensor>& dsources, const Tensor& dy, const Tensor& scratch) {
  const std::vector<Rows> sources = rows_of(mix.sources), grads = rows_of(dsources);
  const Rows d_out(dy), alpha(mix.alpha), rstd(mix.rstd), pieces(scratch);
  const int64_t N = dy.rows(), D = dy.cols(), S = static_cast<int64_t>(sources.size());
  parallel_pieces(N, kRowsPerPiece, [&](int64_t first, int64_t last) {
    float *du = pieces[first / kRowsPerPiece], *b = du + D, *l = b + S;
    std::fill_n(du, D, 0.f);
    for (int64_t n = first; n < last; ++n) {
      mix_backward_row(grads, du, b, l, d_out[n], sources, n, alpha[n], rstd[n], mix.u, D);
    }
  });
}

void residual_site_forward(const ResidualSite& site, const Mix& mix) {
  const bool mixes = !mix.sources.empty(), adds = site.prefix_in && site.delta;
  const std::vector<Rows> sources = rows_of(mix.sources);
  const Rows prefix(site.prefix), prefix_in(site.prefix_in), delta(site.delta), y(site.y);
  const Rows h(mixes ? site.h : site.prefix), alpha(site.alpha), mix_rstd(site.mix_rstd);
  const float* out_norm = site.out_norm.f32();
  float* rstd = site.rstd.f32();
  const int64_t D = site.y.cols();
  parallel_for(site.y.rows(), [&](int64_t n) {
    if (adds) {
      const float *x = prefix_in[n], *d = delta[n];
      float* sum = prefix[n];
#pragma omp simd
      for (int64_t c = 0; c < D; ++c) sum[c] = x[c] + d[c];
    }
    if (mixes) {
      mix_weights(alpha[n], mix_rstd[n], sources, n, mix.u, D, site.eps);
      mix_row(h[n], sources, n, alpha[n], D);
    }
    rstd[n] = rms_rstd(h[n], D, site.eps);
    scale_row(y[n], h[n], out_norm, rstd[n], D);
  });
}

void residual_site_backward(const ResidualSite& site, const Mix& mix, const std::vector<Tensor>& dsources,
                            const ResidualSiteGrads& grads, const Tensor& dy, const Tensor& scratch) {
  const bool mixes = !mix.sources.empty();
  const std::vector<Rows> sources = rows_of(mix.sources), d_sources = rows_of(dsources);
  const Rows d_out(dy), h(mixes ? site.h : site.prefix), d_prefix(grads.dprefix), pieces(scratch);
  const Rows alpha(site.alpha), mix_rstd(site.mix_rstd);
  const float *out_norm = site.out_norm.f32(), *rstd = site.rstd.f32();
  const int64_t N = dy.rows(), D = dy.cols(), S = static_cast<int64_t>(sources.size());
  const int64_t dw_at = mix_scratch_width(S, D);
  parallel_pieces(N, kRowsPerPiece, [&](int64_t first, int64_t last) {
    float *du = pieces[first / kRowsPerPiece], *b = du + D, *l = b + S, *dw = du + dw_at, *dh = dw + D;
    std::fill_n(du, D, 0.f);
    std::fill_n(dw, D, 0.f);
    for (int64_t n = first; n < last; ++n) {
      if (!mixes) {
        rms_norm_backward_row(d_prefix[n], dw, d_out[n], h[n], out_norm, rstd[n], D, true);
        continue;
      }
      rms_norm_backward_row(dh, dw, d_out[n], h[n], out_norm, rstd[n], D, false);
      mix_backward_row(d_sources, du, b, l, dh, sources, n, alpha[n], mix_rstd[n], mix.u, D);
    }
  });
  add_pieces(grads.dout_norm.f32(), scratch.f32() + dw_at, scratch.rows(), scratch.ld, D);
}

void recompute_h(const Mix& mix, const Tensor& h) {
  const std::vector<Rows> sources = rows_of(mix.sources);
  const Rows out(h), alpha(mix.alpha);
  parallel_for(h.rows(), [&](int64_t n) { mix_row(out[n], sources, n, alpha[n], h.cols()); });
}

void recompute_y(const Tensor& y, const Tensor& h, const Tensor& out_norm, const Tensor& rstd) {
  const Rows out(y), in(h);
  const float *w = out_norm.f32(), *r = rstd.f32();
  parallel_for(h.rows(), [&](int64_t n) { scale_row(out[n], in[n], w, r[n], h.cols()); });
}

}  // namespace kestrel::cpu
