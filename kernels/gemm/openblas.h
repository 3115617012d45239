// OpenBLAS as a product for the CPU.  Used only where KESTREL_HAVE_OPENBLAS is defined.
#pragma once

#include <string>

#include "kernels/gemm/own_gemm.h"

namespace kestrel::cpu {

// C is cut into pieces that depend on the shape alone; each piece is one single-threaded OpenBLAS call, and our own
// threads share the pieces.  OpenBLAS never starts threads beside ours, and bits do not depend on how many there are.
void openblas_parallel(const Product& p);
std::string openblas_description();

}  // namespace kestrel::cpu
