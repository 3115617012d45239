// The CUDA side of elementwise.h; arguments as there, checked by the caller.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel::cuda {

void fill_zero(Stream& s, Tensor t);
void copy_cast(Stream& s, Tensor out, Tensor in);
void add_into(Stream& s, Tensor out, Tensor in, float scale);
void document_starts(Stream& s, Tensor document_start, Tensor segment);

}  // namespace kestrel::cuda
