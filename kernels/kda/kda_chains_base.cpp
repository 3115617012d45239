// Chains for the instruction set the program is compiled for.
#include "kernels/kda/kda_chain_forms.h"
#include "kernels/kda/kda_chains.h"

namespace kestrel::cpu::kda {

ChainForms chain_forms_base() {
  return {forward_chain<8>, backward_chain<8>};
}

}  // namespace kestrel::cpu::kda
