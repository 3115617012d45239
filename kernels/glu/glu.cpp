#include "kernels/glu/glu.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/glu/glu_cpu.h"
#include "kernels/glu/glu_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for gated units in this build");
}

void check_row_scale(const char* name, const Tensor& t, int64_t rows) {
  KESTREL_CHECK(t.empty() || (t.dtype == DType::f32 && t.numel() == rows && t.contiguous()), name, " is ", t.describe(),
                ", expected F32[", rows, "] or nothing");
}

void check_kind(const Glu& glu) {
  KESTREL_CHECK(glu.kind == Glu::Kind::silu || (glu.beta > 0.f && glu.linear_beta > 0.f), "SiTU with beta ", glu.beta,
                " and linear_beta ", glu.linear_beta, ", expected positive numbers");
}

float* data_or_null(const Tensor& t) {
  return t ? t.f32() : nullptr;
}

}  // namespace

void glu_forward(Stream& s, const Glu& glu, Tensor y, Tensor a, Tensor b, Tensor row_scale) {
  const OpRange range(s, "glu_forward");
  check_kind(glu);
  check_matrix("b", b, a.dtype, a.rows(), a.cols());
  check_matrix("y", y, a.dtype, a.rows(), a.cols());
  check_row_scale("row_scale", row_scale, a.rows());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::glu_forward(s, glu, y, a, b, row_scale);
  }
  require_cpu(s);
  cpu::glu_forward(glu, y, a, b, data_or_null(row_scale));
}

void glu_backward(Stream& s, const Glu& glu, Tensor da, Tensor db, Tensor drow_scale, Tensor dy, Tensor a, Tensor b,
                  Tensor row_scale) {
  const OpRange range(s, "glu_backward");
  check_kind(glu);
  check_matrix("b", b, a.dtype, a.rows(), a.cols());
  check_matrix("dy", dy, a.dtype, a.rows(), a.cols());
  check_matrix("da", da, a.dtype, a.rows(), a.cols());
  check_matrix("db", db, a.dtype, a.rows(), a.cols());
  check_row_scale("row_scale", row_scale, a.rows());
  check_row_scale("drow_scale", drow_scale, a.rows());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::glu_backward(s, glu, da, db, drow_scale, dy, a, b, row_scale);
  }
  require_cpu(s);
  cpu::glu_backward(glu, da, db, data_or_null(drow_scale), dy, a, b, data_or_null(row_scale));
}

void sigmoid_gate_forward(Stream& s, Tensor y, Tensor o, Tensor gate) {
  const OpRange range(s, "sigmoid_gate_forward");
  check_matrix("gate", gate, o.dtype, o.rows(), o.cols());
  check_matrix("y", y, o.dtype, o.rows(), o.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::sigmoid_gate_forward(s, y, o, gate);
  }
  require_cpu(s);
  cpu::sigmoid_gate_forward(y, o, gate);
}

void sigmoid_gate_backward(Stream& s, Tensor d_o, Tensor dgate, Tensor dy, Tensor o, Tensor gate) {
  const OpRange range(s, "sigmoid_gate_backward");
  check_matrix("gate", gate, o.dtype, o.rows(), o.cols());
  check_matrix("dy", dy, o.dtype, o.rows(), o.cols());
  check_matrix("d_o", d_o, o.dtype, o.rows(), o.cols());
  check_matrix("dgate", dgate, o.dtype, o.rows(), o.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::sigmoid_gate_backward(s, d_o, dgate, dy, o, gate);
  }
  require_cpu(s);
  cpu::sigmoid_gate_backward(d_o, dgate, dy, o, gate);
}

}  // namespace kestrel
