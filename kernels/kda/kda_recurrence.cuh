// KDA token by token on CUDA: any K, V <= 256, F32 or bf16 activations, either gate, any alignment.
#pragma once

#include "kernels/core/cuda.cuh"
#include "kernels/kda/kda.h"

namespace kestrel::cuda::kda {

constexpr int64_t kRecurrenceWidest = 256;  // K and V

// Takes its scratch, then returns when the stream is planning.
void recurrence_forward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved);
// `saved` as either form left it.
void recurrence_backward(Stream& s, const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o,
                         Tensor d_final_state, const KdaGrads& grads);

}  // namespace kestrel::cuda::kda
