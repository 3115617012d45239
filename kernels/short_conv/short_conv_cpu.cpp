#include "kernels/short_conv/short_conv_cpu.h"

#include <algorithm>

#include "kernels/core/math.h"
#include "kernels/core/parallel.h"

namespace kestrel::cpu {
namespace {

// Work is cut into tiles of kConvRowsPerPiece rows and kChannels channels; what a tile needs besides its rows (weights
// turned to [W, channels], u, du) lives on the stack and stays in the first cache.  The tile functions are not inlined:
// parallel_for holds its body twice, serial and threaded, and one copy of the arithmetic has the same bits in both.
constexpr int64_t kChannels = 128;
using TileRow = float[kChannels];

struct Tile {
  int64_t piece, b, first, last;  // rows [first, last) of batch row b
  int64_t c0, channels;
};

// Calls fn(tile) for every tile; tiles are independent.
template <class F>
void for_each_tile(int64_t B, int64_t T, int64_t C, F&& fn) {
  const int64_t blocks = (C + kChannels - 1) / kChannels;
  const int64_t pieces = conv_pieces(B, T);
  if (pieces == 0) return;
  const int64_t per_row = pieces / B;
  parallel_for(pieces * blocks, [&](int64_t i) {
    const int64_t piece = i / blocks, c0 = i % blocks * kChannels;
    const int64_t first = piece % per_row * kConvRowsPerPiece;
    fn(Tile{piece, piece / per_row, first, std::min(first + kConvRowsPerPiece, T), c0, std::min(kChannels, C - c0)});
  });
}

// The inputs of one tile, addressed by time and lag.
class TileInput {
 public:
  TileInput(const ConvInput& in, const Tile& tile)
      : W_(in.weight.cols()),
        x_(in.x.f32() + tile.b * in.T * in.x.ld + tile.c0),
        x_ld_(in.x.ld),
        start_(in.document_start ? in.document_start.i32() + tile.b * in.document_start.ld : nullptr),
        history_(in.history ? in.history.f32() + (tile.b + 1) * (W_ - 1) * in.history.ld + tile.c0 : nullptr),
        history_ld_(in.history.ld),
        channels_(tile.channels) {
    const float* w = in.weight.f32() + tile.c0 * W_;
    for (int64_t lag = 0; lag < W_; ++lag) {
      for (int64_t c = 0; c < channels_; ++c) weight_[lag][c] = w[c * W_ + (W_ - 1 - lag)];
    }
  }

  // The number of earlier tokens that token t sees: taps at t - 1 .. t - reach.
  int64_t reach(int64_t t) const {
    int64_t r = W_ - 1;
    if (!history_) r = std::min(r, t);
    if (start_) r = std::min<int64_t>(r, t - start_[t]);
    return r;
  }
  const float* weight(int64_t lag) const { return weight_[lag]; }  // tap of x[t - lag]
  const float* x(int64_t t) const { return t >= 0 ? x_ + t * x_ld_ : history_ + t * history_ld_; }

  void convolve(float* u, int64_t t) const {
    const int64_t r = reach(t);
    const float *x0 = x(t), *w0 = weight(0);
#pragma omp simd
    for (int64_t c = 0; c < channels_; ++c) u[c] = w0[c] * x0[c];
    for (int64_t lag = 1; lag <= r; ++lag) {
      const float *xl = x(t - lag), *wl = weight(lag);
#pragma omp simd
      for (int64_t c = 0; c < channels_; ++c) u[c] += wl[c] * xl[c];
    }
  }

 private:
  int64_t W_;
  const float* x_;
  int64_t x_ld_;
  const int32_t* start_;
  const float* history_;  // one row past the newest
  int64_t history_ld_, channels_;
  TileRow weight_[kMaxConvWidth];
};

[[gnu::noinline]] void forward_tile(const ConvInput& in, const Tile& tile, const Tensor& y) {
  const TileInput input(in, tile);
  float* out = y.f32() + tile.b * in.T * y.ld + tile.c0;
  TileRow u;
  for (int64_t t = tile.first; t < tile.last; ++t) {
    input.convolve(u, t);
    float* to = out + t * y.ld;
#pragma omp simd
    for (int64_t c = 0; c < tile.channels; ++c) to[c] = silu_f(u[c]);
  }
}

[[gnu::noinline]] void backward_tile(const ConvInput& in, const Tile& tile, const Tensor& dx, const Tensor& dy,
                                     float* partial) {
  const TileInput input(in, tile);
  const int64_t W = in.weight.cols(), C = in.x.cols(), n = tile.channels, row0 = tile.b * in.T;
  float *d_in = dx.f32() + row0 * dx.ld + tile.c0, *d_out = dy.f32() + row0 * dy.ld + tile.c0;
  TileRow dw[kMaxConvWidth] = {};
  TileRow du[kMaxConvWidth];  // du of the last W tokens, by t mod 8
  // Backwards in time, so that du of the W-1 later tokens, which read x[t] too, is at hand.  Those past the tile's end
  // are computed by both neighbours.
  for (int64_t t = std::min(tile.last + W - 1, in.T) - 1; t >= tile.first; --t) {
    float* d = du[t % kMaxConvWidth];
    const float* g = d_out + t * dy.ld;
    input.convolve(d, t);
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float u = d[c], sg = sigmoid_f(u);
      d[c] = g[c] * (sg * (1.f + u * (1.f - sg)));
    }
    if (t >= tile.last) continue;
    const int64_t reach = input.reach(t);
    for (int64_t lag = 0; lag <= reach; ++lag) {
      const float* x = input.x(t - lag);
      float* to = dw[lag];
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) to[c] += d[c] * x[c];
    }
    float* to = d_in + t * dx.ld;
    const float* w0 = input.weight(0);
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) to[c] = w0[c] * d[c];
    for (int64_t lag = 1; lag < W && t + lag < in.T; ++lag) {
      if (input.reach(t + lag) < lag) continue;
      const float *later = du[(t + lag) % kMaxConvWidth], *w = input.weight(lag);
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) to[c] += w[c] * later[c];
    }
  }
  for (int64_t lag = 0; lag < W; ++lag) {
    std::copy_n(dw[lag], n, partial + (tile.piece * W + (W - 1 - lag)) * C + tile.c0);
  }
}

// dweight[c,i] += sum_p partial[p,i,c], p ascending.
void add_weight_pieces(float* dweight, const float* partial, int64_t pieces, int64_t W, int64_t C) {
  parallel_pieces(C, kChannels, [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < W; ++i) {
      TileRow sum = {};
      for (int64_t p = 0; p < pieces; ++p) {
        const float* x = partial + (p * W + i) * C + first;
#pragma omp simd
        for (int64_t c = 0; c < last - first; ++c) sum[c] += x[c];
      }
      for (int64_t c = first; c < last; ++c) dweight[c * W + i] += sum[c - first];
    }
  });
}

}  // namespace

void short_conv_forward(const ConvInput& in, const Tensor& y) {
  for_each_tile(in.B, in.T, in.x.cols(), [&](const Tile& tile) { forward_tile(in, tile, y); });
}

void short_conv_backward(const ConvInput& in, const Tensor& dx, float* dweight, const Tensor& dy, float* partial) {
  for_each_tile(in.B, in.T, in.x.cols(), [&](const Tile& tile) { backward_tile(in, tile, dx, dy, partial); });
  add_weight_pieces(dweight, partial, conv_pieces(in.B, in.T), in.weight.cols(), in.x.cols());
}

}  // namespace kestrel::cpu
