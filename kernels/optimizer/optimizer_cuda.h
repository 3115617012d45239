// The CUDA side of optimizer.h; arguments as there, checked by the caller.  Those that need scratch take it themselves,
// and return when the stream is planning.
#pragma once

#include <vector>

#include "kernels/optimizer/optimizer.h"

namespace kestrel::cuda {

void adamw_step(Stream& s, const AdamW& h, Tensor p, Tensor g, Tensor m, Tensor v, float grad_scale);
void newton_schulz(Stream& s, Tensor x, int steps);                                           // takes scratch
void muon_step(Stream& s, const Muon& h, Tensor p, Tensor g, Tensor m, int64_t block_stride,  // takes scratch;
               float grad_scale);                                                             // block_stride is not 0
void sum_of_squares(Stream& s, Tensor out, const std::vector<Tensor>& tensors);               // takes scratch
void qk_clip(Stream& s, Tensor w_q, Tensor w_kv, Tensor s_max, float tau, int64_t nope, int64_t rope, int64_t v);
void mxfp4_pack(Stream& s, Tensor packed, Tensor scale, Tensor w);
void mxfp4_unpack(Stream& s, Tensor dequantized, Tensor packed, Tensor scale);
void mxfp4_fake_quantize(Stream& s, Tensor dequantized, Tensor w);

}  // namespace kestrel::cuda
