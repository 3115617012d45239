// The CUDA side of attention.h; arguments as there, checked by the caller.  Scratch is taken before planning returns.
#pragma once

#include "kernels/attention/attention.h"

namespace kestrel::cuda {

constexpr int64_t kMostHeadChannels = 256;     // Dqk and Dv of the own kernels
constexpr int64_t kMostLatentChannels = 1152;  // c + rope of mla_decode

// cuDNN where it serves the problem (BF16, no document mask: attention_cudnn.h), the own kernels otherwise.
void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit);
void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start);

void mla_assemble_forward(Stream& s, const MlaDims& d, Tensor k, Tensor v, Tensor kv, Tensor k_shared);
void mla_assemble_backward(Stream& s, const MlaDims& d, Tensor dkv, Tensor dk_shared, Tensor dk, Tensor dv);

// ConfigError when c + rope is beyond kMostLatentChannels.
void mla_decode(Stream& s, const MlaDims& d, int64_t past, Tensor o, Tensor q, Tensor latent, Tensor k_shared,
                Tensor kv_b);

// The own kernels: any T, any Dqk and Dv up to kMostHeadChannels, documents.
namespace own {
void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit);
void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start);
}  // namespace own

}  // namespace kestrel::cuda
