// The plain ones: copies, casts, sums.
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

void fill_zero(Stream& s, Tensor t);               // t = 0 (any dtype, any ld)
void copy_cast(Stream& s, Tensor out, Tensor in);  // out = in, between F32 and BF16, any ld
void add_into(Stream& s, Tensor out, Tensor in,
              float scale = 1.f);  // out += scale in; F32, BF16 (on a GPU), or I32 with scale 1

// document_start[b,t] = first token of the document that token (b,t) belongs to, 0 <= document_start <= t, from segment
// ids [B,T] I32 (a new document starts wherever the id changes).  The form every kernel takes: token j is visible from
// token i iff document_start[i] <= j <= i.
void document_starts(Stream& s, Tensor document_start, Tensor segment);

}  // namespace kestrel
