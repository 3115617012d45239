// Causal softmax attention, and the pieces of NoPE multi-head latent attention (MLA) around it.
//
//   attention   s_ij = Dqk^(-1/2) <q_i, k_j>,  j <= i and j >= document_start[i];   o_i = sum_j softmax_j(s_ij) v_j
// Shapes: q, k [B*T, H*Dqk], v, o [B*T, H*Dv] (any ld), lse [B,H,T] F32 (log-sum-exp, saved for backward);
// document_start [B,T] I32 or empty; max_logit [H] F32 or empty: raised to the largest s_ij of each head (QK-clip).
// Never holds the T x T scores: tiles only.  Backward overwrites dq, dk, dv.
//
//   mla_assemble   k[n,h] = [kv[n,h,:dn] ; k_shared[n]],  v[n,h] = kv[n,h,dn:]
// kv [N, H*(dn+dv)], k_shared [N, dr] (any ld), k [N, H*(dn+dr)], v [N, H*dv].  Backward overwrites dkv and
// dk_shared[n] = sum_h dk[n,h,dn:].
//
// dtypes: F32; on CUDA q, k, v, o and their gradients may be BF16 instead (scores, softmax and sums stay fp32).  On
// CUDA Dqk and Dv are at most 256; cuDNN serves BF16 without documents (attention_cudnn.h says when), own kernels the
// rest: cuDNN would want documents as sequences of lengths known to the host.  mla_decode on CUDA takes c + rope up to
// 1152, a ConfigError beyond.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

struct AttentionDims {
  int64_t B, T, H, Dqk, Dv;
};

void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit = {});
void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start);

struct MlaDims {
  int64_t N, H, nope, rope, v;
};
void mla_assemble_forward(Stream& s, const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared);
void mla_assemble_backward(Stream& s, const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv);

// Decoding against a cache of latents: no key or value is expanded.
//   q [M, H*(nope+rope)] for M new tokens at positions past .. past+M-1;  latent [S, c] (normalised), k_shared [S,
//   rope], the whole cache with the M new tokens already in it (S = past + M);  kv_b [H*(nope+v), c];  o [M, H*v]. s_j
//   = (nope+rope)^(-1/2) ( <W_k,h^T q_nope, latent_j> + <q_rope, k_shared_j> );  o_h = W_v,h sum_j softmax(s)_j
//   latent_j
void mla_decode(Stream& s, const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared,
                Tensor kv_b);

}  // namespace kestrel
