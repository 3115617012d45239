#include "kernels/attention/attention.h"

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/core/device.h"
#include "kernels/core/profile.h"

namespace kestrel {
namespace {

// CPU activations are F32; on CUDA they are F32 or BF16.
void check_device(const Stream& s, DType dtype) {
  KESTREL_CHECK(kBuiltWithCuda || s.device() == Device::cpu, "attention has no ", name_of(s.device()),
                " back end in this build");
  KESTREL_CHECK(dtype == DType::f32 || (dtype == DType::bf16 && s.device() == Device::cuda), "attention on ",
                name_of(s.device()), " of ", name_of(dtype));
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

void check_attention(const Stream& s, const AttentionDims& d, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& o, const Tensor& lse, const Tensor& document_start) {
  KESTREL_CHECK(d.B >= 0 && d.T >= 0 && d.H >= 1 && d.Dqk >= 1 && d.Dv >= 1, "attention of B ", d.B, " T ", d.T, " H ",
                d.H, " Dqk ", d.Dqk, " Dv ", d.Dv);
  check_device(s, q.dtype);
  check_matrix("q", q, q.dtype, d.B * d.T, d.H * d.Dqk);
  check_matrix("k", k, q.dtype, d.B * d.T, d.H * d.Dqk);
  check_matrix("v", v, q.dtype, d.B * d.T, d.H * d.Dv);
  check_matrix("o", o, q.dtype, d.B * d.T, d.H * d.Dv);
  check_vector("lse", lse, DType::f32, d.B * d.H * d.T);
  if (document_start) check_vector("document_start", document_start, DType::i32, d.B * d.T);
}

void check_mla(const MlaDims& d) {
  KESTREL_CHECK(d.H >= 1 && d.nope >= 0 && d.rope >= 0 && d.nope + d.rope >= 1 && d.v >= 1, "MLA of H ", d.H, " nope ",
                d.nope, " rope ", d.rope, " v ", d.v);
}

}  // namespace

void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit) {
  const OpRange range(s, "attention_forward");
  check_attention(s, d, q, k, v, o, lse, document_start);
  if (max_logit) check_vector("max_logit", max_logit, DType::f32, d.H);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      return cuda::attention_forward(s, d, o, lse, q, k, v, document_start, max_logit);
    }
  }
  ScratchScope scope(s);
  Tensor row_max;
  if (max_logit) row_max = s.temp({d.B, d.H, cpu::attention_tiles(d.T)}, DType::f32);
  if (s.planning()) return;
  cpu::attention_forward(d, o, lse, q, k, v, document_start, max_logit, row_max);
}

void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start) {
  const OpRange range(s, "attention_backward");
  check_attention(s, d, q, k, v, o, lse, document_start);
  check_matrix("dq", dq, q.dtype, d.B * d.T, d.H * d.Dqk);
  check_matrix("dk", dk, q.dtype, d.B * d.T, d.H * d.Dqk);
  check_matrix("dv", dv, q.dtype, d.B * d.T, d.H * d.Dv);
  check_matrix("d_o", d_o, q.dtype, d.B * d.T, d.H * d.Dv);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      return cuda::attention_backward(s, d, dq, dk, dv, d_o, o, lse, q, k, v, document_start);
    }
  }
  ScratchScope scope(s);
  Tensor delta = s.temp({d.B, d.H, d.T}, DType::f32);
  if (s.planning()) return;
  cpu::attention_backward(d, dq, dk, dv, d_o, o, lse, q, k, v, document_start, delta);
}

void mla_assemble_forward(Stream& s, const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared) {
  const OpRange range(s, "mla_assemble_forward");
  check_mla(d);
  check_device(s, kv.dtype);
  check_matrix("k", k, kv.dtype, d.N, d.H * (d.nope + d.rope));
  check_matrix("v", v, kv.dtype, d.N, d.H * d.v);
  check_matrix("kv", kv, kv.dtype, d.N, d.H * (d.nope + d.v));
  check_matrix("k_shared", k_shared, kv.dtype, d.N, d.rope);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mla_assemble_forward(s, d, k, v, kv, k_shared);
  }
  cpu::mla_assemble_forward(d, k, v, kv, k_shared);
}

void mla_assemble_backward(Stream& s, const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv) {
  const OpRange range(s, "mla_assemble_backward");
  check_mla(d);
  check_device(s, dkv.dtype);
  check_matrix("dkv", dkv, dkv.dtype, d.N, d.H * (d.nope + d.v));
  check_matrix("dk_shared", dk_shared, dkv.dtype, d.N, d.rope);
  check_matrix("dk", dk, dkv.dtype, d.N, d.H * (d.nope + d.rope));
  check_matrix("dv", dv, dkv.dtype, d.N, d.H * d.v);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mla_assemble_backward(s, d, dkv, dk_shared, dk, dv);
  }
  cpu::mla_assemble_backward(d, dkv, dk_shared, dk, dv);
}

void mla_decode(Stream& s, const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared,
                Tensor kv_b) {
  const OpRange range(s, "mla_decode");
  check_mla(d);
  check_device(s, q.dtype);
  const int64_t M = q.rows(), S = latent.rows(), c = latent.cols();
  KESTREL_CHECK(past >= 0 && S == past + M, "a cache of ", S, " tokens, ", past, " past and ", M, " new ones");
  check_matrix("q", q, q.dtype, M, d.H * (d.nope + d.rope));
  check_matrix("o", o, q.dtype, M, d.H * d.v);
  check_matrix("latent", latent, q.dtype, S, c);
  check_matrix("k_shared", k_shared, q.dtype, S, d.rope);
  check_matrix("kv_b", kv_b, q.dtype, d.H * (d.nope + d.v), c);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mla_decode(s, d, past, o, q, latent, k_shared, kv_b);
  }
  ScratchScope scope(s);
  const int64_t rows = cpu::decode_block(M, d.H) * d.H;
  Tensor query = s.temp({rows, c + d.rope}, DType::f32), sum = s.temp({rows, c}, DType::f32);
  if (s.planning()) return;
  cpu::mla_decode(d, past, o, q, latent, k_shared, kv_b, query, sum);
}

}  // namespace kestrel
