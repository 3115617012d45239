// Attention by cuDNN: forward and a backward whose bits repeat.  A build without cuDNN's frontend headers has these
// functions too; `serves` is then always false.
#pragma once

#include <string>

#include "kernels/attention/attention_cuda.h"

namespace kestrel::cuda::cudnn {

// "cuDNN 9.19.0", or why there is none.  Loads the library at the first call; needs no GPU.
std::string description();
bool available();

// What one call is about: the tensors' leading dimensions and alignment matter, what they hold does not.
struct Problem {
  AttentionDims d;
  Tensor q, k, v, o;
  bool documents;  // documents would have to be sequences of lengths that the host knows: the own kernels take those
};
// Whether cuDNN takes the problem: BF16 rows of 16-byte pieces, T >= 128, no documents, widths of which this version is
// known to be right, and a plan that cuDNN could make for the current device (on a machine without one: assumed).
bool serves_forward(const Problem& p, bool with_max_logit);
// Also: dP tiles of at least one head fit kBackwardWorkspace.
bool serves_backward(const Problem& p, const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// cuDNN's deterministic backward keeps dP of every head, T x T in BF16: heads are taken a few at a time, so many that
// they keep the device busy and this much scratch holds them.
constexpr int64_t kBackwardWorkspace = int64_t{2} << 30;
struct HeadSlice {
  int64_t batches, heads;  // divisors of B and H; heads == H unless batches == 1.  Zero: not even one head fits.
};
HeadSlice backward_slice(const AttentionDims& d);

// Scratch is taken before planning returns.
void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor max_logit);
void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v);

// lse (which holds each query's largest score) += log(sum_exp); max_logit[h] raised to the head's largest score.
void merge_softmax_terms(Stream& s, const AttentionDims& d, Tensor lse, Tensor sum_exp, Tensor max_logit);

}  // namespace kestrel::cuda::cudnn
