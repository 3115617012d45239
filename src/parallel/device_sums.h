// Collectives over tensors of a stream: in place on the CPU, staged through host memory from a GPU.  With one rank they
// do nothing, not even wait.
#pragma once

#include "kernels/core/stream.h"
#include "src/parallel/communicator.h"

namespace kestrel {

// t = sum over ranks of t (F32 or I32); t = the largest (F32).  Contiguous tensors.
void sum_over(Stream& s, Communicator& ranks, Tensor t);
void max_over(Stream& s, Communicator& ranks, Tensor t);
// Communicator::reduce_scatter (F32 or F64) and all_gather (F32) of a flat tensor.
void reduce_scatter(Stream& s, Communicator& ranks, Tensor flat, std::span<const int64_t> cuts);
void all_gather(Stream& s, Communicator& ranks, Tensor flat, std::span<const int64_t> cuts);

}  // namespace kestrel
