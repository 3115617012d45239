#include "kernels/gemm/pack.h"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace kestrel::cpu {
namespace {

template <int kCount>
void copy_rows(float* out, int width, int64_t depth, const float* in, int64_t step) {
  for (int64_t k = 0; k < depth; ++k) std::memcpy(out + k * width, in + k * step, sizeof(float) * kCount);
}

// Elements of one k lie together: short copies, unrolled for the widths of whole panels.
void pack_adjacent(float* out, int width, int count, int64_t depth, const float* in, int64_t step) {
  switch (count) {
    case 6:
      return copy_rows<6>(out, width, depth, in, step);
    case 12:
      return copy_rows<12>(out, width, depth, in, step);
    case 16:
      return copy_rows<16>(out, width, depth, in, step);
    case 32:
      return copy_rows<32>(out, width, depth, in, step);
    default:
      for (int64_t k = 0; k < depth; ++k) {
        for (int i = 0; i < count; ++i) out[k * width + i] = in[k * step + i];
      }
  }
}

// Rows [i, i + 4) of the operand, each contiguous along k, into columns [i, i + 4) of the panel.
void transpose_four(float* out, int width, int64_t depth, const float* in, int64_t own) {
  int64_t k = 0;
#if defined(__SSE2__)
  for (; k + 4 <= depth; k += 4) {
    __m128 r0 = _mm_loadu_ps(in + k), r1 = _mm_loadu_ps(in + own + k);
    __m128 r2 = _mm_loadu_ps(in + 2 * own + k), r3 = _mm_loadu_ps(in + 3 * own + k);
    _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
    _mm_storeu_ps(out + k * width, r0);
    _mm_storeu_ps(out + (k + 1) * width, r1);
    _mm_storeu_ps(out + (k + 2) * width, r2);
    _mm_storeu_ps(out + (k + 3) * width, r3);
  }
#endif
  for (; k < depth; ++k) {
    for (int i = 0; i < 4; ++i) out[k * width + i] = in[i * own + k];
  }
}

void pack_transposed(float* out, int width, int count, int64_t depth, const float* in, int64_t own) {
  int i = 0;
  for (; i + 4 <= count; i += 4) transpose_four(out + i, width, depth, in + i * own, own);
  if (i < count && count > 4) {  // the last four again, overlapping
    transpose_four(out + count - 4, width, depth, in + (count - 4) * own, own);
  } else {
    for (; i < count; ++i) {
      for (int64_t k = 0; k < depth; ++k) out[k * width + i] = in[i * own + k];
    }
  }
}

}  // namespace

void pack_panel(float* out, int width, int count, int64_t depth, const float* in, int64_t own, int64_t step) {
  if (own == 1) {
    pack_adjacent(out, width, count, depth, in, step);
  } else {
    pack_transposed(out, width, count, depth, in, own);
  }
  if (count < width) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int i = count; i < width; ++i) out[k * width + i] = 0.f;
    }
  }
}

}  // namespace kestrel::cpu
