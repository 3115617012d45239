#include "kernels/experts/experts.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/experts/experts_cpu.h"
#include "kernels/experts/experts_cuda.h"
#include "kernels/experts/grouped_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "the experts have no ", name_of(s.device()), " back end in this build");
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

void check_plan(const DispatchPlan& plan) {
  KESTREL_CHECK(plan.row_of.rank == 2 && plan.row_of.dtype == DType::i32, "row_of is ", plan.row_of.describe(),
                ", expected I32[N,slots]");
  KESTREL_CHECK(plan.max_rows() <= INT32_MAX, plan.tokens(), " tokens of ", plan.slots(),
                " slots: rows are numbered in 32 bits");
  check_vector("token_of", plan.token_of, DType::i32, plan.max_rows());
  KESTREL_CHECK(plan.experts() >= 1, "offsets is ", plan.offsets.describe(), ", expected I64[E+1]");
  check_vector("offsets", plan.offsets, DType::i64, plan.experts() + 1);
}

// w [E,out,in] (or its gradient), contiguous; offsets [E+1].
void check_grouped(const Tensor& w, DType dtype, const Tensor& offsets) {
  KESTREL_CHECK(w.rank == 3 && w.dtype == dtype && w.contiguous(), "w is ", w.describe(), ", expected a contiguous ",
                name_of(dtype), "[E,out,in]");
  check_vector("offsets", offsets, DType::i64, w.dim(0) + 1);
}

// Rows of a product: F32, on a GPU BF16 too.
void check_rows(const Stream& s, const char* name, const Tensor& t) {
  KESTREL_CHECK(t.dtype == DType::f32 || (t.dtype == DType::bf16 && s.device() == Device::cuda), name, " is ",
                t.describe(), ", the ", name_of(s.device()), " back end of the experts takes F32",
                s.device() == Device::cuda ? " or BF16" : "");
}

// The CPU's table of tiles; the GPU finds its tiles without one.
Tensor first_tile_of(Stream& s, int64_t experts) {
  return s.device() == Device::cpu ? s.temp({experts + 1}, DType::i64) : Tensor();
}

// A per-row scalar buffer is a vector.
void check_scalars(const Tensor& rows, const Tensor& value, const DispatchPlan& plan) {
  check_plan(plan);
  check_matrix("value", value, DType::f32, plan.tokens(), plan.slots());
  check_vector("per-row scalars", rows, DType::f32, rows.numel());
}

}  // namespace

void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index) {
  const OpRange range(s, "dispatch_plan");
  check_plan(plan);
  check_matrix("index", index, DType::i32, plan.tokens(), plan.slots());
  ScratchScope scope(s);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      const cuda::DispatchCut cut(plan.max_rows(), plan.experts());
      const Tensor counts = s.temp({cut.pieces, plan.experts()}, DType::i32);
      const Tensor totals = s.temp({plan.experts()}, DType::i32);
      if (!s.planning()) cuda::dispatch_plan(s, plan, index, cut, counts, totals);
      return;
    }
  }
  Tensor cursor = s.temp({plan.experts()}, DType::i64);
  if (s.planning()) return;
  require_cpu(s);
  cpu::dispatch_plan(plan, index, cursor);
}

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan) {
  const OpRange range(s, "gather_rows");
  check_plan(plan);
  check_rows(s, "rows", rows);
  check_matrix("x", x, rows.dtype, plan.tokens(), rows.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::gather_rows(s, rows, x, plan);
  }
  require_cpu(s);
  cpu::gather_rows(rows, x, plan);
}

void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan) {
  const OpRange range(s, "sum_rows");
  check_plan(plan);
  check_rows(s, "rows", rows);
  check_matrix("y", y, rows.dtype, plan.tokens(), rows.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::sum_rows(s, y, rows, plan);
  }
  require_cpu(s);
  cpu::sum_rows(y, rows, plan);
}

void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan) {
  const OpRange range(s, "gather_slots");
  check_scalars(out, value, plan);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::gather_slots(s, out, value, plan);
  }
  require_cpu(s);
  cpu::gather_slots(out, value, plan);
}

void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan) {
  const OpRange range(s, "scatter_slots");
  check_scalars(in, value, plan);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::scatter_slots(s, value, in, plan);
  }
  require_cpu(s);
  cpu::scatter_slots(value, in, plan);
}

void grouped_linear_forward(Stream& s, Tensor y, Tensor x, Tensor w, Tensor offsets) {
  const OpRange range(s, "grouped_linear_forward");
  check_rows(s, "x", x);
  check_grouped(w, x.dtype, offsets);
  check_matrix("x", x, x.dtype, x.rows(), w.dim(2));
  check_matrix("y", y, x.dtype, x.rows(), w.dim(1));
  ScratchScope scope(s);
  Tensor first_tile = first_tile_of(s, w.dim(0));
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::grouped_linear_forward(s, y, x, w, offsets);
  }
  require_cpu(s);
  cpu::grouped_linear_forward(y, x, w, offsets, first_tile);
}

void grouped_linear_backward_input(Stream& s, Tensor dx, Tensor dy, Tensor w, Tensor offsets) {
  const OpRange range(s, "grouped_linear_backward_input");
  check_rows(s, "dy", dy);
  check_grouped(w, dy.dtype, offsets);
  check_matrix("dy", dy, dy.dtype, dy.rows(), w.dim(1));
  check_matrix("dx", dx, dy.dtype, dy.rows(), w.dim(2));
  ScratchScope scope(s);
  Tensor first_tile = first_tile_of(s, w.dim(0));
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::grouped_linear_backward_input(s, dx, dy, w, offsets);
  }
  require_cpu(s);
  cpu::grouped_linear_backward_input(dx, dy, w, offsets, first_tile);
}

void grouped_linear_backward_weight(Stream& s, Tensor dw, Tensor dy, Tensor x, Tensor offsets) {
  const OpRange range(s, "grouped_linear_backward_weight");
  check_rows(s, "x", x);
  check_grouped(dw, DType::f32, offsets);
  check_matrix("dy", dy, x.dtype, x.rows(), dw.dim(1));
  check_matrix("x", x, x.dtype, x.rows(), dw.dim(2));
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::grouped_linear_backward_weight(s, dw, dy, x, offsets);
  }
  require_cpu(s);
  cpu::grouped_linear_backward_weight(dw, dy, x, offsets);
}

}  // namespace kestrel
