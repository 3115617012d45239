// Load balancing by bias: statistics of a global batch in, the next step's bias out.  Kimi K3 report, section 2.3.3 and
// appendices C, D; kernels/router/README.md has the derivation.
//
// quantile (K3).  For each token i and expert j the bias that would just put j at the token's cutoff is
//   r_ij = alpha_i - s_ij.   The next bias of j is the (k/E)-quantile of r_.j over the global batch, minus its mean
//   over j.  Estimated from integer counts: `bins` uniform bins over [min b - 1, max b + 1], b the bias of this step:
//     bin(r) = floor((r - lo) * per_unit) clamped to [0, bins-1],  lo = min b - 1,  per_unit = bins / (max b - min b +
//     2)
//   in fp32, so that counts of any sharding add up to the same integers.  Solve in fp64: n = sum of the expert's
//   counts, q = n k / E, beta = first bin with cumulative count >= ceil(q),
//     b_hat = lo + (beta + clip((q - before)/here, 0, 1)) / per_unit;   an expert without counts keeps its bias
//   b' = b + gain (b_hat - b), then minus the mean, rounded to fp32 once.
// exact.  -b_hat_j = the (q+1)-th largest s_ij - alpha_i, q = floor(n k / E), by selection instead of counts.
// micro_mean.  `exact` per micro-batch, averaged over micro-batches with equal weight.
// quantile_dynamic.  No fixed k: expert j fires where s_ij + b_j > 0.  -b_hat_j = the (q+1)-th largest s_.j, exact or
//   from a histogram on [0,1] read from the top the way `quantile` reads it from the bottom.
//   b' = ema b + (1 - ema) b_hat, no centring.
// sign.  b_j += rate * sign(mean load - load_j), then minus the mean.
//
// A NaN margin or score is counted nowhere: n is what an expert really saw.  k == E is refused (nothing to balance).
#pragma once

#include "kernels/core/stream.h"

namespace kestrel {

// Counts of one micro-batch are added to hist [E,bins] I32.  logits [N,E] F32 (the scores are recomputed), cutoff [N]
// F32, bias [E] F32 (the one that routed this micro-batch), valid [N] U8 or empty.  A count holds up to 2^31-1 tokens.
void quantile_histogram(Stream& s, Tensor hist, Tensor logits, Tensor cutoff, Tensor bias, Tensor valid = {});
// bias [E] in place; hist holds the whole global batch; 0 < gain <= 1 (a gain above 1 oscillates).
void quantile_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float gain);

// Dynamic form: hist [E,bins] I32 over scores in [0,1]: bin(s) = min(floor(s * bins), bins-1).
void score_histogram(Stream& s, Tensor hist, Tensor logits, Tensor valid = {});
void dynamic_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float ema);
// Starting bias for scores of logits ~ N(0, sigma^2): -sigmoid(sigma * PhiInv(1 - k/E)), the same for every expert.
float dynamic_initial_bias(int64_t experts, int64_t k, float sigma);

// Exact order statistics over margins [n,E] F32 = s_ij - alpha_i (or s_ij for the dynamic form) of the whole batch.
// Rows of tokens that are not valid are NaN.  exact_solve leaves b_hat[j] as it is where column j has no number: fill
// b_hat with the bias first where that can happen.
void margins(Stream& s, Tensor out, Tensor logits, Tensor cutoff /* empty: scores */, Tensor valid = {});
void exact_solve(Stream& s, Tensor b_hat, Tensor margins, int64_t k, bool centre);

void sign_solve(Stream& s, Tensor bias, Tensor load, float rate);

}  // namespace kestrel
