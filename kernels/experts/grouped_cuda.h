// The CUDA side of the grouped products of experts.h; arguments as there, checked by the caller.  No scratch, and the
// host never reads the offsets: grids are sized for the worst case, blocks find their tiles from the device's offsets.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel::cuda {

// automatic: Hopper's where it can serve, by tiles of 128 x 256 or 128 x 128 as the shapes suggest; portable otherwise.
// Naming one is for tests and measurements; one that cannot serve throws.
enum class GroupedPath { automatic, portable, hopper_128, hopper_256 };

void grouped_linear_forward(Stream& s, Tensor y, Tensor x, Tensor w, Tensor offsets,
                            GroupedPath path = GroupedPath::automatic);
void grouped_linear_backward_input(Stream& s, Tensor dx, Tensor dy, Tensor w, Tensor offsets,
                                   GroupedPath path = GroupedPath::automatic);
void grouped_linear_backward_weight(Stream& s, Tensor dw, Tensor dy, Tensor x, Tensor offsets,
                                    GroupedPath path = GroupedPath::automatic);

// One product D = A B per expert, on raw pointers.  The dimension that the offsets cut is `room`: the rows of the
// buffers, of which [offsets[e], offsets[e+1]) belong to expert e.
//                       A [M,K]            B [K,N]              D [M,N]              M      N    K
//   forward             x rows of e        w[e]^T (w [N,K])     y rows of e          room   out  in
//   backward_input      dy rows of e       w[e]   (w [K,N])     dx rows of e         room   in   out
//   backward_weight     (dy rows of e)^T   x rows of e          dw[e], F32, added    out    in   room
enum class Grouped { forward, backward_input, backward_weight };
struct GroupedProblem {
  Grouped what = Grouped::forward;
  DType dtype = DType::f32;  // of A and B
  const void *a = nullptr, *b = nullptr;
  void* d = nullptr;
  int64_t lda = 0, ldb = 0, ldd = 0;         // elements between two rows in memory
  const int64_t* offsets = nullptr;          // [experts + 1], device
  int64_t experts = 0, M = 0, N = 0, K = 0;  // the ragged one of M and K is room
  int64_t room() const { return what == Grouped::backward_weight ? K : M; }
};

// Used by grouped_linear.cu only.
void grouped_f32(Stream& s, const GroupedProblem& p);                       // F32, FFMA
void grouped_mma(Stream& s, const GroupedProblem& p);                       // BF16, mma.sync: any size and alignment
bool grouped_hopper_serves(const GroupedProblem& p);                        // this device, this build, this problem
void grouped_hopper(Stream& s, const GroupedProblem& p, GroupedPath path);  // BF16, TMA and wgmma

}  // namespace kestrel::cuda
