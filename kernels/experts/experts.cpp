#include "kernels/experts/experts.h"

#include "kernels/experts/experts_cpu.h"

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
  check_vector("token_of", plan.token_of, DType::i32, plan.max_rows());
  KESTREL_CHECK(plan.experts() >= 1, "offsets is ", plan.offsets.describe(), ", expected I64[E+1]");
  check_vector("offsets", plan.offsets, DType::i64, plan.experts() + 1);
}

void check_f32(const char* name, const Tensor& t) {
  KESTREL_CHECK(t.dtype == DType::f32, name, " is ", t.describe(), ", expected F32");
}

// w [E,out,in], contiguous; offsets [E+1].
void check_grouped(const Tensor& w, const Tensor& offsets) {
  KESTREL_CHECK(w.rank == 3 && w.dtype == DType::f32 && w.contiguous(), "w is ", w.describe(),
                ", expected a contiguous F32[E,out,in]");
  check_vector("offsets", offsets, DType::i64, w.dim(0) + 1);
}

// A per-row scalar buffer is a vector.
void check_scalars(const Tensor& rows, const Tensor& value, const DispatchPlan& plan) {
  check_plan(plan);
  check_matrix("value", value, DType::f32, plan.tokens(), plan.slots());
  check_vector("per-row scalars", rows, DType::f32, rows.numel());
}

}  // namespace

void dispatch_plan(Stream& s, const DispatchPlan& plan, Tensor index) {
  check_plan(plan);
  check_matrix("index", index, DType::i32, plan.tokens(), plan.slots());
  ScratchScope scope(s);
  Tensor cursor = s.temp({plan.experts()}, DType::i64);
  if (s.planning()) return;
  require_cpu(s);
  cpu::dispatch_plan(plan, index, cursor);
}

void gather_rows(Stream& s, Tensor rows, Tensor x, const DispatchPlan& plan) {
  check_plan(plan);
  check_matrix("x", x, DType::f32, plan.tokens(), rows.cols());
  check_f32("rows", rows);
  if (s.planning()) return;
  require_cpu(s);
  cpu::gather_rows(rows, x, plan);
}

void sum_rows(Stream& s, Tensor y, Tensor rows, const DispatchPlan& plan) {
  check_plan(plan);
  check_matrix("y", y, DType::f32, plan.tokens(), rows.cols());
  check_f32("rows", rows);
  if (s.planning()) return;
  require_cpu(s);
  cpu::sum_rows(y, rows, plan);
}

void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan) {
  check_scalars(out, value, plan);
  if (s.planning()) return;
  require_cpu(s);
  cpu::gather_slots(out, value, plan);
}

void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan) {
  check_scalars(in, value, plan);
  if (s.planning()) return;
  require_cpu(s);
  cpu::scatter_slots(value, in, plan);
}

void grouped_linear_forward(Stream& s, Tensor y, Tensor x, Tensor w, Tensor offsets) {
  check_grouped(w, offsets);
  check_matrix("x", x, DType::f32, x.rows(), w.dim(2));
  check_matrix("y", y, DType::f32, x.rows(), w.dim(1));
  ScratchScope scope(s);
  Tensor first_tile = s.temp({w.dim(0) + 1}, DType::i64);
  if (s.planning()) return;
  require_cpu(s);
  cpu::grouped_linear_forward(y, x, w, offsets, first_tile);
}

void grouped_linear_backward_input(Stream& s, Tensor dx, Tensor dy, Tensor w, Tensor offsets) {
  check_grouped(w, offsets);
  check_matrix("dy", dy, DType::f32, dy.rows(), w.dim(1));
  check_matrix("dx", dx, DType::f32, dy.rows(), w.dim(2));
  ScratchScope scope(s);
  Tensor first_tile = s.temp({w.dim(0) + 1}, DType::i64);
  if (s.planning()) return;
  require_cpu(s);
  cpu::grouped_linear_backward_input(dx, dy, w, offsets, first_tile);
}

void grouped_linear_backward_weight(Stream& s, Tensor dw, Tensor dy, Tensor x, Tensor offsets) {
  check_grouped(dw, offsets);
  check_matrix("dy", dy, DType::f32, x.rows(), dw.dim(1));
  check_matrix("x", x, DType::f32, x.rows(), dw.dim(2));
  if (s.planning()) return;
  require_cpu(s);
  cpu::grouped_linear_backward_weight(dw, dy, x, offsets);
}

}  // namespace kestrel
