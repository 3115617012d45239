// Dropless dispatch of tokens to experts, products of ragged groups, and the way back.  Every order is fixed:
// repeatable.
//
// A plan sorts the (token, slot) pairs by expert, stable in token order: rows of expert e are [offsets[e],
// offsets[e+1]).
//   gather_rows     rows[row_of[n,j],:] = x[n,:]            dispatch; backward of sum_rows
//   sum_rows        y[n,:] = sum_j rows[row_of[n,j],:]      combine; backward of gather_rows; slots in order, fp32 sums;
//                                                           tokens without any slot get zeros
//   gather_slots    out[row] = value[n,j]                   per-row scalars, F32
//   scatter_slots   value[n,j] = in[row]                    0 for unused slots
//   grouped_linear  y[r,:] = x[r,:] w[e]^T                  for the rows r of expert e;  w [E,out,in]
//        backward  dx[r,:] = dy[r,:] w[e];   dw[e] += dy_e^T x_e (an expert without rows is left as it is)
//
// Shapes: index, row_of [N,slots] I32 (-1: unused), offsets [E+1] I64, token_of [R] I32; R <= N*slots rows are in use,
// rows beyond offsets[E] are never read or written.
// dtypes: x, y, rows, dx, dy and w F32, on CUDA F32 or BF16 with fp32 sums; dw F32.  An index outside [-1,E) is a
// ContractError on the CPU; on CUDA, where nobody waits for the answer, the slot counts as unused.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

struct DispatchPlan {
  Tensor row_of;    // [N,slots] I32
  Tensor token_of;  // [N*slots] I32
  Tensor offsets;   // [E+1] I64
  int64_t tokens() const { return row_of.dim(0); }
  int64_t slots() const { return row_of.dim(1); }
  int64_t max_rows() const { return row_of.numel(); }
  int64_t experts() const { return offsets.numel() - 1; }
};

void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index);
void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan);
void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan);
void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan);
void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan);

void grouped_linear_forward(Stream& s, Tensor y, Tensor x, Tensor w, Tensor offsets);
void grouped_linear_backward_input(Stream& s, Tensor dx, Tensor dy, Tensor w, Tensor offsets);
void grouped_linear_backward_weight(Stream& s, Tensor dw, Tensor dy, Tensor x, Tensor offsets);

}  // namespace kestrel
