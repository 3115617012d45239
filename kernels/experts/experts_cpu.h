// CPU side of the expert kernels.  Included by this room only.
#pragma once

#include "kernels/experts/experts.h"

namespace kestrel::cpu {

// Rows (forward, backward to the input) or output features (backward to the weight) of one task.
constexpr int64_t kGroupTile = 128;

// cursor [E] I64: scratch.
void dispatch_plan(const DispatchPlan& plan, Tensor index, Tensor cursor);
void gather_rows(Tensor rows, Tensor x, const DispatchPlan& plan);
void sum_rows(Tensor y, Tensor rows, const DispatchPlan& plan);
void gather_slots(Tensor out, Tensor value, const DispatchPlan& plan);
void scatter_slots(Tensor value, Tensor in, const DispatchPlan& plan);

// first_tile [E+1] I64: scratch.
void grouped_linear_forward(Tensor y, Tensor x, Tensor w, Tensor offsets, Tensor first_tile);
void grouped_linear_backward_input(Tensor dx, Tensor dy, Tensor w, Tensor offsets, Tensor first_tile);
void grouped_linear_backward_weight(Tensor dw, Tensor dy, Tensor x, Tensor offsets);

}  // namespace kestrel::cpu
