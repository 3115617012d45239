// Machine instructions of the KDA kernels beyond kernels/core/mma.cuh.
//
// mma_16x8x8: D[16,8] += A[16,8] B[8,8], tf32 inputs, float sums.  With g = lane / 4 and t = lane % 4 a lane holds
//   a[0] = A[g][t]   a[1] = A[g+8][t]   a[2] = A[g][t+4]   a[3] = A[g+8][t+4]     b[0] = B[t][g]   b[1] = B[t+4][g]
// and D as in mma_16x8x16.
#pragma once

#include <cuda_fp16.h>

#include "kernels/core/mma.cuh"

namespace kestrel::cuda {

// Rounded to the 11 bits that tf32 keeps, nearest, ties away from zero.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The inverse of ldmatrix_x4_trans: element [g][2t], [g][2t+1] of tile i goes to rows 2t, 2t+1, place g of the rows
// that lanes 8i .. 8i+7 point to (sm_90).
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Dynamic shared memory of the block.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

}  // namespace kestrel::cuda
