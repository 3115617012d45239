// The chunked form on the CPU: chunks of a chain one after another, chains in parallel.
#pragma once

#include "kernels/kda/kda.h"
#include "kernels/kda/kda_chain_forms.h"

namespace kestrel {

// The checks shared by every form of the operation.
void check_kda_inputs(const KdaDims& d, const KdaInputs& in);
void check_kda_grads(const KdaDims& d, const Tensor& d_o, const Tensor& d_final_state, const KdaGrads& g);
void check_kda_state(const char* name, const KdaDims& d, const Tensor& t);

}  // namespace kestrel

namespace kestrel::cpu {

// Scratch in F32 elements; it depends on the sizes alone, never on the number of threads.
int64_t kda_forward_scratch(const KdaDims& d);
int64_t kda_backward_scratch(const KdaDims& d);

void kda_forward(const KdaDims& d, const KdaInputs& in, Tensor o, Tensor final_state, Tensor saved, float* scratch,
                 const kda::ChainForms& forms = kda::best_chain_forms());
void kda_backward(const KdaDims& d, const KdaInputs& in, Tensor saved, Tensor d_o, Tensor d_final_state,
                  const KdaGrads& grads, float* scratch, const kda::ChainForms& forms = kda::best_chain_forms());

}  // namespace kestrel::cpu
