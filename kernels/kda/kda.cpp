#include "kernels/kda/kda.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/kda/kda_cpu.h"
#include "kernels/kda/kda_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s, DType activations) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for KDA in this build");
  KESTREL_CHECK(activations == DType::f32, "the CPU computes KDA in F32 only, got ", name_of(activations));
}

void check_vector(const char* name, const Tensor& t, int64_t n) {
  KESTREL_CHECK(t.dtype == DType::f32 && t.numel() == n && t.contiguous(), name, " is ", t.describe(),
                ", expected F32[", n, "]");
}

}  // namespace

void check_kda_state(const char* name, const KdaDims& d, const Tensor& t) {
  if (t) check_vector(name, t, d.B * d.H * d.K * d.V);
}

void check_kda_inputs(const KdaDims& d, const KdaInputs& in) {
  KESTREL_CHECK(d.B >= 1 && d.T >= 1 && d.H >= 1 && d.K >= 1 && d.V >= 1, "KDA over B=", d.B, " T=", d.T, " H=", d.H,
                " K=", d.K, " V=", d.V);
  const int64_t rows = d.B * d.T;
  const DType dtype = in.q.dtype;
  KESTREL_CHECK(dtype == DType::f32 || dtype == DType::bf16, "q is ", in.q.describe(), ", expected F32 or BF16");
  check_matrix("q", in.q, dtype, rows, d.H * d.K);
  check_matrix("k", in.k, dtype, rows, d.H * d.K);
  check_matrix("v", in.v, dtype, rows, d.H * d.V);
  check_matrix("gate", in.gate, dtype, rows, d.H * d.K);
  check_matrix("beta", in.beta, dtype, rows, d.H);
  check_vector("A_log", in.A_log, d.H);
  check_vector("dt_bias", in.dt_bias, d.H * d.K);
  check_kda_state("initial_state", d, in.initial_state);
  KESTREL_CHECK(!in.lower_bound || (*in.lower_bound >= -5.9f && *in.lower_bound < 0.f), "lower_bound ", *in.lower_bound,
                " is outside [-5.9, 0)");
  KESTREL_CHECK(!in.document_start || (in.document_start.dtype == DType::i32 && in.document_start.numel() == rows &&
                                       in.document_start.contiguous()),
                "document_start is ", in.document_start.describe(), ", expected I32[", d.B, ",", d.T, "]");
}

void check_kda_grads(const KdaDims& d, const Tensor& d_o, const Tensor& d_final_state, const KdaGrads& g) {
  const int64_t rows = d.B * d.T;
  const DType dtype = d_o.dtype;
  check_matrix("d_o", d_o, dtype, rows, d.H * d.V);
  check_kda_state("d_final_state", d, d_final_state);
  check_matrix("dq", g.dq, dtype, rows, d.H * d.K);
  check_matrix("dk", g.dk, dtype, rows, d.H * d.K);
  check_matrix("dv", g.dv, dtype, rows, d.H * d.V);
  check_matrix("dgate", g.dgate, dtype, rows, d.H * d.K);
  check_matrix("dbeta", g.dbeta, dtype, rows, d.H);
  check_vector("dA_log", g.dA_log, d.H);
  check_vector("ddt_bias", g.ddt_bias, d.H * d.K);
  check_kda_state("d_initial_state", d, g.d_initial_state);
}

int64_t kda_saved_elements(const KdaDims& d, Device device, DType activations) {
  if constexpr (kBuiltWithCuda) {
    if (device == Device::cuda) return cuda::kda_saved_elements(d, activations);
  }
  KESTREL_CHECK(device == Device::cpu && activations == DType::f32, "no ", name_of(device), " back end for KDA in ",
                name_of(activations), " in this build");
  return kda_saved_elements(d);
}

void kda_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved) {
  const OpRange range(s, "kda_forward");
  check_kda_inputs(d, in);
  check_matrix("o", o, in.q.dtype, d.B * d.T, d.H * d.V);
  check_kda_state("final_state", d, final_state);
  if (saved) check_vector("saved", saved, kda_saved_elements(d, s.device(), in.q.dtype));
  ScratchScope scope(s);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::kda_forward(s, d, in, o, final_state, saved);
  }
  require_cpu(s, in.q.dtype);
  Tensor scratch = s.temp({cpu::kda_forward_scratch(d)});
  if (s.planning()) return;
  cpu::kda_forward(d, in, o, final_state, saved, scratch.f32());
}

void kda_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads) {
  const OpRange range(s, "kda_backward");
  check_kda_inputs(d, in);
  check_kda_grads(d, d_o, d_final_state, grads);
  KESTREL_CHECK(d_o.dtype == in.q.dtype, "d_o is ", d_o.describe(), " but q is ", in.q.describe());
  const int64_t kept = kda_saved_elements(d, s.device(), in.q.dtype);
  if (kept > 0 || saved) check_vector("saved", saved, kept);
  ScratchScope scope(s);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::kda_backward(s, d, in, saved, d_o, d_final_state, grads);
  }
  require_cpu(s, in.q.dtype);
  Tensor scratch = s.temp({cpu::kda_backward_scratch(d)});
  if (s.planning()) return;
  cpu::kda_backward(d, in, saved, d_o, d_final_state, grads, scratch.f32());
}

}  // namespace kestrel
