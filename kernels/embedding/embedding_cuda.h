// The CUDA side of embedding.h; arguments as there, checked by the caller.  Backward takes its scratch from the stream
// and returns when the stream is only planning.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel::cuda {

void embedding_forward(Stream& s, Tensor y, Tensor ids, Tensor table);
void embedding_backward(Stream& s, Tensor dtable, Tensor dy, Tensor ids);

}  // namespace kestrel::cuda
