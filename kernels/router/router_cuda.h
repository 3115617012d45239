// The CUDA side of router.h and balancing.h; arguments as there, checked by the caller.  Decisions are those of the CPU
// for the same scores: keys of floats are compared, counts are integers, sums of floats have a fixed order.
#pragma once

#include "kernels/router/router.h"

namespace kestrel::cuda {

void route_forward(Stream& s, const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid);
void route_backward(Stream& s, const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score);

// partial [pieces of kAuxRows] F32 and counted [1] I32 are scratch.
constexpr int64_t kAuxRows = 64;
void aux_loss(Stream& s, float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits, Tensor load,
              int64_t k, Tensor valid, Tensor partial, Tensor counted);

void quantile_histogram(Stream& s, Tensor hist, Tensor logits, Tensor cutoff, Tensor bias, Tensor valid);
void score_histogram(Stream& s, Tensor hist, Tensor logits, Tensor valid);
// next [E] F64 is scratch.
void quantile_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float gain, Tensor next);
void dynamic_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float ema);
void margins(Stream& s, Tensor out, Tensor logits, Tensor cutoff, Tensor valid);
// Scratch: counts [E, 256] I32, prefix [E] I32, rank [E] I64, next [E] F64.
struct ExactScratch {
  Tensor counts, prefix, rank, next;
};
void exact_solve(Stream& s, Tensor b_hat, Tensor margins, int64_t k, bool centre, const ExactScratch& scratch);
void sign_solve(Stream& s, Tensor bias, Tensor load, float rate, Tensor next);

}  // namespace kestrel::cuda
