// The choice between instruction sets: both work on one whole chain.
#pragma once

#include "kernels/kda/kda_chunk.h"

namespace kestrel::cpu::kda {

// saved: nullptr in inference.
using ForwardChain = void(const KdaDims& d, const ChainInputs& in, ChunkWork& w, Rows o, float* final_state,
                          const Saved* saved);
using BackwardChain = void(const KdaDims& d, const ChainInputs& in, ChunkWork& w, const Saved& saved, Rows d_o,
                           const float* d_final_state, const ChainGrads& g);

struct ChainForms {
  ForwardChain* forward;
  BackwardChain* backward;
};
ChainForms chain_forms_base();         // for the instruction set the program is compiled for
ChainForms chain_forms_avx512();       // nullptrs when the compiler or this machine has no AVX-512
const ChainForms& best_chain_forms();  // of these two

}  // namespace kestrel::cpu::kda
