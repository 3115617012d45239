// Token embedding:  y[n,:] = table[ids[n],:];  backward  dtable[ids[n],:] += dy[n,:]  (adds, in token order:
// repeatable).
//
// ids: N contiguous I32 of any rank, in [0, V) - an id outside is a ContractError on the CPU (data readers have checked
// it before); on the GPU, where nobody waits for it, it reads as a row of NaN and its gradient is dropped; table [V,D]
// in the activation dtype, y [N,D]; dtable [V,D] F32; dy F32 or the activation dtype.  Any ld. N = 0 is allowed.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

void embedding_forward(Stream& s, Tensor y, Tensor ids, Tensor table);
void embedding_backward(Stream& s, Tensor dtable, Tensor dy, Tensor ids);

}  // namespace kestrel
