// What the own attention kernels are given: for each tensor the rows of one head of one sequence.
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

// Tensor [B*T, H*D] cut by (sequence, head) into [T, D] with rows ld apart.
template <class E>
struct HeadRows {
  E* data = nullptr;
  int64_t ld = 0;
  int width = 0;      // D
  bool wide = false;  // every row of every head may be accessed 16 bytes at a time

  HeadRows() = default;
  HeadRows(const Tensor& t, int64_t D)
      : data(data_of<std::remove_const_t<E>>(t)),
        ld(t.ld),
        width(static_cast<int>(D)),
        wide(cuda::wide(t, kPerAccess<E>) && D % kPerAccess<E> == 0) {}
  // The same with data at the first row of (b, h).
  __device__ HeadRows of(int64_t b, int64_t h, int64_t T) const {
    HeadRows r = *this;
    r.data += b * T * ld + h * width;
    return r;
  }
  __device__ E* row(int64_t i) const { return data + i * ld; }
};

// What every own kernel reads.
template <class E>
struct AttentionInput {
  HeadRows<const E> q, k, v;
  const int32_t* start;  // [B,T] first visible key of each query, or null: 0.  Never decreases along a sequence.
  int T, H;              // positions in a sequence are ints in the kernels, offsets are not
  float scale;

  AttentionInput(const AttentionDims& d, const Tensor& tq, const Tensor& tk, const Tensor& tv,
                 const Tensor& document_start)
      : q(tq, d.Dqk),
        k(tk, d.Dqk),
        v(tv, d.Dv),
        start(document_start ? document_start.i32() : nullptr),
        T(static_cast<int>(d.T)),
        H(static_cast<int>(d.H)),
        scale(1.f / sqrtf(static_cast<float>(d.Dqk))) {}
};

// Raises *p to x.  The order of the calls does not matter: a maximum has no rounding.
__device__ __forceinline__ void raise_to(float* p, float x) {
  if (x >= 0.f) {
    atomicMax(reinterpret_cast<int*>(p), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(p), __float_as_uint(x));
  }
}

// Rows of B*H*T as blocks of a one-dimensional grid.
inline unsigned grid_of(int64_t blocks) {
  KESTREL_CHECK(blocks <= INT32_MAX, "attention of ", blocks, " blocks");
  return static_cast<unsigned>(blocks);
}

// delta[b,h,i] = <d_o_i, o_i> = sum_j P_ij dP_ij, and lse_log2 = log2(e) lse: both [B,H,T], what the backward kernels
// of attention_backward.cu and attention_plain.cu start from.
void attention_row_terms(Stream& s, const AttentionDims& d, Tensor delta, Tensor lse_log2, Tensor d_o, Tensor o,
                         Tensor lse);

// BF16: attention_forward.cu, attention_backward.cu.  F32: attention_plain.cu.
void attention_forward_mma(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                           Tensor document_start, Tensor max_logit);
void attention_backward_mma(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                            Tensor delta, Tensor lse_log2, Tensor q, Tensor k, Tensor v, Tensor document_start);
void attention_forward_plain(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                             Tensor document_start, Tensor max_logit);
void attention_backward_plain(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                              Tensor delta, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start);

}  // namespace kestrel::cuda
