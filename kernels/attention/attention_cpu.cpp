#include "kernels/attention/attention_cpu.h"

#include <cmath>

#include "kernels/core/parallel.h"
#include "kernels/gemm/gemm.h"

namespace kestrel::cpu {
namespace {

constexpr int64_t kTile = kAttentionTile;

// The rows of one head in one sequence: [T, D] with rows ld apart.
struct Rows {
  float* data = nullptr;
  int64_t ld = 0;

  Rows(const Tensor& t, const AttentionDims& d, int64_t b, int64_t h, int64_t width)
      : data(t.f32() + b * d.T * t.ld + h * width), ld(t.ld) {}
  float* row(int64_t i) const { return data + i * ld; }
};

// One head of one sequence: what both directions read.
struct HeadInput {
  Rows q, k, v;
  const int32_t* start;  // first visible key of each query, or null: 0.  Never decreases along the sequence.
  float scale;

  HeadInput(const AttentionDims& d, const Tensor& tq, const Tensor& tk, const Tensor& tv, const Tensor& document_start,
            int64_t b, int64_t h)
      : q(tq, d, b, h, d.Dqk),
        k(tk, d, b, h, d.Dqk),
        v(tv, d, b, h, d.Dv),
        start(document_start ? document_start.i32() + b * d.T : nullptr),
        scale(1.f / std::sqrt(static_cast<float>(d.Dqk))) {}

  int64_t first_key(int64_t query) const { return start == nullptr ? 0 : start[query]; }
  // Visible columns [lo, hi) of the tile of keys [key, key + cols) for one query.
  int64_t lo(int64_t query, int64_t key) const { return std::max(int64_t{0}, first_key(query) - key); }
  int64_t hi(int64_t query, int64_t key, int64_t cols) const { return std::min(cols, query - key + 1); }

  // s [rows, cols], rows kTile apart = scale * q k^T
  void scores(const AttentionDims& d, float* s, int64_t query, int64_t rows, int64_t key, int64_t cols) const {
    sgemm_serial(Trans::no, Trans::yes, rows, cols, d.Dqk, scale, q.row(query), q.ld, k.row(key), k.ld, 0.f, s, kTile);
  }
};

void scale_row(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// Queries [i0, i0 + rows): streams over the visible keys, keeping a running maximum and sum per query; the output rows
// themselves hold the running numerator.  Returns the largest score.
float forward_tile(const AttentionDims& d, const HeadInput& in, const Rows& o, float* lse, int64_t i0) {
  alignas(64) float s[kTile * kTile];
  SoftmaxRow state[kTile];
  const int64_t rows = std::min(kTile, d.T - i0);
  const int64_t first = in.first_key(i0) / kTile * kTile;
  for (int64_t j0 = first; j0 < i0 + rows; j0 += kTile) {
    const int64_t cols = std::min(kTile, d.T - j0);
    in.scores(d, s, i0, rows, j0, cols);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = i0 + r;
      const float factor = state[r].absorb(s + r * kTile, in.lo(i, j0), in.hi(i, j0, cols), cols);
      if (j0 > first && factor != 1.f) scale_row(o.row(i), d.Dv, factor);
    }
    // the first product overwrites: o may hold anything
    sgemm_serial(Trans::no, Trans::no, rows, d.Dv, cols, 1.f, s, kTile, in.v.row(j0), in.v.ld, j0 == first ? 0.f : 1.f,
                 o.row(i0), o.ld);
  }
  float largest = state[0].largest;
  for (int64_t r = 0; r < rows; ++r) {
    scale_row(o.row(i0 + r), d.Dv, 1.f / state[r].sum);
    lse[i0 + r] = state[r].largest + std::log(state[r].sum);
    largest = std::max(largest, state[r].largest);
  }
  return largest;
}

}  // namespace

void attention_forward(const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit, Tensor row_max) {
  const int64_t tiles = attention_tiles(d.T);
  parallel_for_dynamic(d.B * d.H * tiles, [&](int64_t task) {
    const int64_t head = task / tiles, tile = tiles - 1 - task % tiles;  // the longest rows first
    const int64_t b = head / d.H, h = head % d.H;
    const HeadInput in(d, q, k, v, document_start, b, h);
    const float largest = forward_tile(d, in, Rows(o, d, b, h, d.Dv), lse.f32() + head * d.T, tile * kTile);
    if (row_max) row_max.f32()[head * tiles + tile] = largest;
  });
  if (!max_logit) return;
  for (int64_t i = 0; i < d.B * d.H * tiles; ++i) {
    float& m = max_logit.f32()[i / tiles % d.H];
    m = std::max(m, row_max.f32()[i]);
  }
}

namespace {

// Gradients of one head of one sequence.
struct HeadGradient {
  Rows dq, dk, dv, d_o;
  const float* lse;
  const float* delta;  // <d_o_i, o_i>
};

// Probabilities of a tile from its scores and the saved log-sum-exp; zero where invisible.
void probabilities(const HeadInput& in, float* s, const float* lse, int64_t i0, int64_t rows, int64_t j0,
                   int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = i0 + r;
    const int64_t lo = std::min(cols, in.lo(i, j0)), hi = std::max(lo, in.hi(i, j0, cols));
    float* row = s + r * kTile;
    std::fill(row, row + lo, 0.f);
    std::fill(row + hi, row + cols, 0.f);
    const float log_sum = lse[i];
#pragma omp simd
    for (int64_t j = lo; j < hi; ++j) row[j] = exp_f(row[j] - log_sum);
  }
}

// Adds what the pair (queries i0.., keys j0..) gives to dq, dk, dv; `first` = the keys' first pair overwrites dk, dv.
//   P = softmax tile;  dV += P^T dO;  dS = scale P (dO V^T - delta);  dK += dS^T Q;  dQ += dS K
void backward_pair(const AttentionDims& d, const HeadInput& in, const HeadGradient& g, int64_t i0, int64_t j0,
                   bool first) {
  alignas(64) float p[kTile * kTile], ds[kTile * kTile];
  const int64_t rows = std::min(kTile, d.T - i0), cols = std::min(kTile, d.T - j0);
  const float beta = first ? 0.f : 1.f;
  in.scores(d, p, i0, rows, j0, cols);
  probabilities(in, p, g.lse, i0, rows, j0, cols);
  sgemm_serial(Trans::yes, Trans::no, cols, d.Dv, rows, 1.f, p, kTile, g.d_o.row(i0), g.d_o.ld, beta, g.dv.row(j0),
               g.dv.ld);
  sgemm_serial(Trans::no, Trans::yes, rows, cols, d.Dv, 1.f, g.d_o.row(i0), g.d_o.ld, in.v.row(j0), in.v.ld, 0.f, ds,
               kTile);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = ds + r * kTile;
    const float* prob = p + r * kTile;
    const float delta = g.delta[i0 + r];
    for (int64_t j = 0; j < cols; ++j) row[j] = in.scale * prob[j] * (row[j] - delta);
  }
  sgemm_serial(Trans::yes, Trans::no, cols, d.Dqk, rows, 1.f, ds, kTile, in.q.row(i0), in.q.ld, beta, g.dk.row(j0),
               g.dk.ld);
  sgemm_serial(Trans::no, Trans::no, rows, d.Dqk, cols, 1.f, ds, kTile, in.k.row(j0), in.k.ld, 1.f, g.dq.row(i0),
               g.dq.ld);
}

void backward_head(const AttentionDims& d, const HeadInput& in, const HeadGradient& g) {
  for (int64_t i = 0; i < d.T; ++i) std::fill_n(g.dq.row(i), d.Dqk, 0.f);
  for (int64_t j0 = 0; j0 < d.T; j0 += kTile) {
    const int64_t end = std::min(d.T, j0 + kTile);
    for (int64_t i0 = j0; i0 < d.T && in.first_key(i0) < end; i0 += kTile) backward_pair(d, in, g, i0, j0, i0 == j0);
  }
}

// delta_i = <d_o_i, o_i> = sum_j P_ij dP_ij, from the outputs instead of the probabilities.
void row_dots(const AttentionDims& d, float* delta, const Rows& d_o, const Rows& o) {
  for (int64_t i = 0; i < d.T; ++i) {
    const float *a = d_o.row(i), *b = o.row(i);
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d.Dv; ++c) sum += a[c] * b[c];
    delta[i] = sum;
  }
}

}  // namespace

void attention_backward(const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o, Tensor lse,
                        Tensor q, Tensor k, Tensor v, Tensor document_start, Tensor delta) {
  parallel_for_dynamic(d.B * d.H, [&](int64_t head) {
    const int64_t b = head / d.H, h = head % d.H;
    float* dots = delta.f32() + head * d.T;
    const HeadGradient g{Rows(dq, d, b, h, d.Dqk), Rows(dk, d, b, h, d.Dqk), Rows(dv, d, b, h, d.Dv),
                         Rows(d_o, d, b, h, d.Dv), lse.f32() + head * d.T,   dots};
    row_dots(d, dots, g.d_o, Rows(o, d, b, h, d.Dv));
    backward_head(d, HeadInput(d, q, k, v, document_start, b, h), g);
  });
}

}  // namespace kestrel::cpu
