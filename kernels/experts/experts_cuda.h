// The CUDA side of dispatch and combine of experts.h; arguments as there, checked by the caller.
#pragma once

#include "kernels/experts/experts.h"

namespace kestrel::cuda {

// Pairs (token, slot) in one piece of the counting sort; scratch: counts [pieces, E] I32 and totals [E] I32.
constexpr int64_t kPairsPerPiece = 256;
inline int64_t dispatch_pieces(int64_t pairs) {
  return (pairs + kPairsPerPiece - 1) / kPairsPerPiece;
}
void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index, Tensor counts, Tensor totals);

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan);
void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan);
void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan);
void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan);

}  // namespace kestrel::cuda
