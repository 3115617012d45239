// The CPU side of kernels/embedding.  Shapes as in embedding.h, checked by the caller.
#pragma once

#include "kernels/core/tensor.h"

namespace kestrel::cpu {

// ContractError naming the first id outside [0, vocabulary).
void check_ids(const int32_t* ids, int64_t count, int64_t vocabulary);
void embedding_forward(const Tensor& y, const int32_t* ids, const Tensor& table);
void embedding_backward(const Tensor& dtable, const Tensor& dy, const int32_t* ids);

}  // namespace kestrel::cpu
