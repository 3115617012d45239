// Chains for AVX-512, compiled into every x86 program and used where the machine has it.
#include "kernels/kda/kda_chain_forms.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__GNUC__) && !defined(__clang__)
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// From here on the compiler may use AVX-512: nothing below may be reached on a machine without it.
#pragma GCC target("avx512f,avx512vl,avx512dq,prefer-vector-width=512")
// GCC 12 takes the undefined operand that its own AVX-512 intrinsics pass on for ours (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "kernels/kda/kda_chains.h"

namespace kestrel::cpu::kda {

ChainForms chain_forms_avx512() {
  const bool there =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!there) return {nullptr, nullptr};
  return {forward_chain<16>, backward_chain<16>};
}

}  // namespace kestrel::cpu::kda

#else

namespace kestrel::cpu::kda {
ChainForms chain_forms_avx512() {
  return {nullptr, nullptr};
}
}  // namespace kestrel::cpu::kda

#endif
