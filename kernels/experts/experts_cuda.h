// The CUDA side of dispatch and combine of experts.h; arguments as there, checked by the caller.
#pragma once

#include "kernels/experts/experts.h"

namespace kestrel::cuda {

// How the counting sort cuts the pairs (token, slot): a warp takes 256 of them, a block a piece of `warps` times as
// many.  Each warp counts by expert for itself, so many experts leave room for fewer warps.  A function of the shape
// alone; kCounters of I32 fit into the shared memory of every device we build for.
struct DispatchCut {
  static constexpr int kPairsPerWarp = 256;
  static constexpr int kMostWarps = 8;
  static constexpr int64_t kCounters = 24 << 10;
  int warps;
  int64_t pieces;

  DispatchCut(int64_t pairs, int64_t experts) : warps(kMostWarps) {
    KESTREL_CHECK(experts <= kCounters, "the CUDA back end sorts for at most ", kCounters, " experts, got ", experts);
    while (warps * experts > kCounters) warps /= 2;
    pieces = (pairs + warps * kPairsPerWarp - 1) / (warps * kPairsPerWarp);
  }
};
// Scratch: counts [pieces, E] I32 and totals [E] I32.
void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index, const DispatchCut& cut, Tensor counts,
                   Tensor totals);

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan);
void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan);
void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan);
void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan);

}  // namespace kestrel::cuda
