// What the forward and the backward kernels of the norms share.
//
// All three norms are one: y = w x r sigmoid(g) with r = (scale sum x^2 + eps)^(-1/2), scale = 1/D; the L2 norm has
// scale 1 and no weight, only the gated one has a gate.  A row is D columns of head r % H of token r / H (H = 1 but for
// the gated form).
//
// Two kernels each way.  `Group` kernels: G threads hold a whole row in registers, C packets of 8 elements each, so x
// is read once; a warp takes a row of up to 2048 columns (no synchronisation), a block up to 8192.  `Loop` kernels take
// any width and alignment: a block per row, the row is read again for the second pass.
#pragma once

#include <climits>

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

enum class Norm { rms, gated, l2 };

constexpr int kNormThreads = 128;  // of a Group kernel
constexpr int kLoopThreads = 256;
constexpr int kPacket = 8;

template <class T>
struct NormRows {
  T* data;
  int64_t ld;
};

struct NormShape {
  int64_t rows;  // tokens times heads
  int H, D;
  float scale, eps;
  // Elements from the start of a matrix with leading dimension ld to row r.
  __device__ __forceinline__ int64_t at(int64_t r, int64_t ld) const {
    if (H == 1) return r * ld;
    const unsigned n = static_cast<unsigned>(r) / static_cast<unsigned>(H);
    return n * ld + static_cast<int64_t>(static_cast<unsigned>(r) - n * static_cast<unsigned>(H)) * D;
  }
};

inline NormShape norm_shape(Norm kind, const Tensor& x, int64_t D, float eps) {
  const int64_t H = x.cols() / D;
  KESTREL_CHECK(x.cols() <= INT_MAX && x.rows() * H <= INT_MAX, "a norm over ", x.describe(), " in heads of ", D,
                " has too many rows for one launch");
  return {x.rows() * H, static_cast<int>(H), static_cast<int>(D), kind == Norm::l2 ? 1.f : 1.f / static_cast<float>(D),
          eps};
}

template <int G, int C>
struct Group {
  static constexpr int kThreadsPerRow = G, kPackets = C;
};
// f(Group<..>{}) for the smallest group that holds D columns; returns false when none does.
template <Norm kind, class F>
bool with_group(int D, F&& f) {
  if constexpr (kind == Norm::rms) {
    if (D <= 512) return f(Group<32, 2>{}), true;
    if (D <= 2048) return f(Group<32, 8>{}), true;
    if (D <= 8192) return f(Group<128, 8>{}), true;
  } else {
    if (D <= 128) return f(Group<16, 1>{}), true;
    if (D <= 512) return f(Group<32, 2>{}), true;
  }
  return false;
}

}  // namespace kestrel::cuda
