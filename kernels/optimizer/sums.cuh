// Sums in fp64 and accesses of four elements, shared by the norm of a Muon block and the sum of squares.
#pragma once

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

constexpr int kPacket = 4;  // neighbouring elements a thread takes at a time

// x = p[0..3]: one access when `wide` (p aligned to the packet, four elements left), otherwise element by element, and
// zeros beyond the `left` that there are.  Either way the same elements in the same places, so sums do not depend on
// it.
template <class T>
__device__ __forceinline__ void load_packet(float (&x)[kPacket], const T* p, int64_t left, bool wide) {
  if (wide) return load<kPacket>(x, p);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) x[j] = j < left ? to_float(p[j]) : 0.f;
}
template <class T>
__device__ __forceinline__ void store_packet(T* p, const float (&x)[kPacket], int64_t left, bool wide) {
  if (wide) return store<kPacket>(p, x);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    if (j < left) p[j] = from_float<T>(x[j]);
  }
}

// The sum of partial[0 .. pieces) by one block: thread t adds pieces t, t + threads, ..., in order.
template <int threads>
__device__ __forceinline__ double sum_of_pieces(const double* partial, int64_t pieces, double* shared) {
  double sum = 0;
#pragma unroll 8
  for (int64_t p = threadIdx.x; p < pieces; p += threads) sum += partial[p];
  return block_sum<threads>(sum, shared);
}

}  // namespace kestrel::cuda
