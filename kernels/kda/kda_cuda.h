// KDA on CUDA.  Two forms of the same operation:
//   chunked     bf16 activations, K = V = 64 or 128, bounded gate, 16-byte aligned rows: tensor cores (kda_chunk.cuh)
//   recurrence  everything else with K, V <= 256, F32 or bf16: token by token (kda_recurrence.cu)
// Both keep the same `saved`: the state that enters every 64-token chunk, transposed to [V,K], in the dtype of the
// activations.  So backward of one form can follow forward of the other.
#pragma once

#include "kernels/kda/kda.h"

namespace kestrel::cuda {

int64_t kda_saved_elements(const KdaDims& d, DType activations);

// Arguments were checked by the public functions.  Take their scratch, then return when the stream is planning.
void kda_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved);
void kda_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads);

}  // namespace kestrel::cuda
