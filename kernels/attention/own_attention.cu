// The own kernels behind one pair of functions: tensor cores for BF16, fp32 units for F32.
#include "kernels/attention/head_rows.cuh"

namespace kestrel::cuda::own {

void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit) {
  if (s.planning() || d.B * d.T == 0) return;
  if (q.dtype == DType::bf16) return attention_forward_mma(s, d, o, lse, q, k, v, document_start, max_logit);
  attention_forward_plain(s, d, o, lse, q, k, v, document_start, max_logit);
}

void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start) {
  ScratchScope scope(s);
  const Tensor delta = s.temp({d.B, d.H, d.T}), lse_log2 = s.temp({d.B, d.H, d.T});
  if (s.planning() || d.B * d.T == 0) return;
  attention_row_terms(s, d, delta, lse_log2, d_o, o, lse);
  if (q.dtype == DType::bf16) {
    return attention_backward_mma(s, d, dq, dk, dv, d_o, delta, lse_log2, q, k, v, document_start);
  }
  attention_backward_plain(s, d, dq, dk, dv, d_o, delta, lse, q, k, v, document_start);
}

}  // namespace kestrel::cuda::own
