#include <cmath>

#include "kernels/attention/attention_cpu.h"
#include "kernels/core/parallel.h"
#include "kernels/gemm/gemm.h"

namespace kestrel::cpu {
namespace {

constexpr int64_t kRowGrain = 16;
constexpr int64_t kTile = kAttentionTile;

float* row_f(const Tensor& t, int64_t r) {
  return t.f32() + r * t.ld;
}

}  // namespace

void mla_assemble_forward(const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared) {
  parallel_pieces(d.N, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float *in = row_f(kv, n), *shared = row_f(k_shared, n);
      float *key = row_f(k, n), *value = row_f(v, n);
      for (int64_t h = 0; h < d.H; ++h) {
        key = std::copy_n(in, d.nope, key);
        key = std::copy_n(shared, d.rope, key);
        value = std::copy_n(in + d.nope, d.v, value);
        in += d.nope + d.v;
      }
    }
  });
}

void mla_assemble_backward(const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv) {
  parallel_pieces(d.N, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float *key = row_f(dk, n), *value = row_f(dv, n);
      float *out = row_f(dkv, n), *shared = row_f(dk_shared, n);
      std::fill_n(shared, d.rope, 0.f);
      for (int64_t h = 0; h < d.H; ++h) {
        out = std::copy_n(key, d.nope, out);
        out = std::copy_n(value, d.v, out);
        for (int64_t c = 0; c < d.rope; ++c) shared[c] += key[d.nope + c];
        key += d.nope + d.rope;
        value += d.v;
      }
    }
  });
}

namespace {

// A block of new tokens [first, first + count); its (token, head) pairs are rows token * H + head.  All heads of a
// token see the same keys (the latents), so they are queries of one product.
struct DecodeBlock {
  const MlaDims& d;
  int64_t past, first, count;
  Tensor o, q, latent, k_shared, kv_b, query, sum;

  int64_t c() const { return latent.cols(); }
  int64_t rows() const { return count * d.H; }
  const float* head_weight(int64_t h) const { return row_f(kv_b, h * (d.nope + d.v)); }

  // query[token, h] = [W_k,h^T q_nope ; q_rope]
  void absorb_queries() const {
    parallel_for(d.H, [&](int64_t h) {
      const float* q_head = row_f(q, first) + h * (d.nope + d.rope);
      sgemm_serial(Trans::no, Trans::no, count, c(), d.nope, 1.f, q_head, q.ld, head_weight(h), kv_b.ld, 0.f,
                   row_f(query, h), d.H * query.ld);
      for (int64_t m = 0; m < count; ++m) {
        std::copy_n(q_head + m * q.ld + d.nope, d.rope, row_f(query, m * d.H + h) + c());
      }
    });
  }

  // sum[row] = softmax-weighted mean of the latents up to the row's own token
  void mix_latents(int64_t row0) const {
    alignas(64) float s[kTile * kTile];
    SoftmaxRow state[kTile];
    const float scale = 1.f / std::sqrt(static_cast<float>(d.nope + d.rope));
    const int64_t n = std::min(kTile, rows() - row0);
    const int64_t end = past + first + (row0 + n - 1) / d.H + 1;  // keys the last row sees
    for (int64_t j0 = 0; j0 < end; j0 += kTile) {
      const int64_t cols = std::min(kTile, end - j0);
      const float* x = row_f(query, row0);
      sgemm_serial(Trans::no, Trans::yes, n, cols, c(), scale, x, query.ld, row_f(latent, j0), latent.ld, 0.f, s,
                   kTile);
      sgemm_serial(Trans::no, Trans::yes, n, cols, d.rope, scale, x + c(), query.ld, row_f(k_shared, j0), k_shared.ld,
                   1.f, s, kTile);
      for (int64_t r = 0; r < n; ++r) {
        const int64_t position = past + first + (row0 + r) / d.H;
        const float factor = state[r].absorb(s + r * kTile, 0, std::min(cols, position - j0 + 1), cols);
        float* y = row_f(sum, row0 + r);
        for (int64_t i = 0; j0 > 0 && i < c(); ++i) y[i] *= factor;
      }
      sgemm_serial(Trans::no, Trans::no, n, c(), cols, 1.f, s, kTile, row_f(latent, j0), latent.ld, j0 > 0 ? 1.f : 0.f,
                   row_f(sum, row0), sum.ld);
    }
    for (int64_t r = 0; r < n; ++r) {
      float* y = row_f(sum, row0 + r);
      for (int64_t i = 0; i < c(); ++i) y[i] /= state[r].sum;
    }
  }

  // o[token, h] = W_v,h sum[token, h]
  void expand_values() const {
    parallel_for(d.H, [&](int64_t h) {
      sgemm_serial(Trans::no, Trans::yes, count, d.v, c(), 1.f, row_f(sum, h), d.H * sum.ld,
                   head_weight(h) + d.nope * kv_b.ld, kv_b.ld, 0.f, row_f(o, first) + h * d.v, o.ld);
    });
  }
};

}  // namespace

void mla_decode(const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared, Tensor kv_b,
                Tensor query, Tensor sum) {
  const int64_t M = q.rows(), step = query.rows() / d.H;
  for (int64_t first = 0; first < M; first += step) {
    const DecodeBlock block{d, past, first, std::min(step, M - first), o, q, latent, k_shared, kv_b, query, sum};
    block.absorb_queries();
    const int64_t tiles = (block.rows() + kTile - 1) / kTile;
    parallel_for_dynamic(tiles, [&](int64_t tile) { block.mix_latents(tile * kTile); });
    block.expand_values();
  }
}

}  // namespace kestrel::cpu
