// Token embedding:  y[n,:] = table[ids[n],:];  backward  dtable[ids[n],:] += dy[n,:]  (adds, in token order:
// repeatable).
//
// ids [N] I32 in [0, V) - an id outside is a ContractError on the CPU (data readers have checked it before);
// table [V,D] in the activation dtype, y [N,D]; dtable F32; dy F32 or the activation dtype.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

void embedding_forward(Stream& s, Tensor y, Tensor ids, Tensor table);
void embedding_backward(Stream& s, Tensor dtable, Tensor dy, Tensor ids);

}  // namespace kestrel
