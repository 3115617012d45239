// The CUDA side of short_conv.h; arguments as there, checked by the caller.  Backward takes its scratch from the stream
// and returns when the stream is only planning.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel::cuda {

void short_conv_forward(Stream& s, int64_t B, int64_t T, Tensor y, Tensor x, Tensor weight, Tensor document_start,
                        Tensor history);
void short_conv_backward(Stream& s, int64_t B, int64_t T, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight,
                         Tensor document_start);

}  // namespace kestrel::cuda
