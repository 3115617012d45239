// Which attention serves on CUDA.
#include "kernels/attention/attention_cuda.h"

#include "kernels/attention/attention_cudnn.h"

namespace kestrel::cuda {

void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor document_start, Tensor max_logit) {
  const cudnn::Problem p{d, q, k, v, o, !document_start.empty()};
  if (cudnn::serves_forward(p, !max_logit.empty())) {
    return cudnn::attention_forward(s, d, o, lse, q, k, v, max_logit);
  }
  own::attention_forward(s, d, o, lse, q, k, v, document_start, max_logit);
}

void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v, Tensor document_start) {
  const cudnn::Problem p{d, q, k, v, o, !document_start.empty()};
  if (cudnn::serves_backward(p, d_o, dq, dk, dv)) {
    return cudnn::attention_backward(s, d, dq, dk, dv, d_o, o, lse, q, k, v);
  }
  own::attention_backward(s, d, dq, dk, dv, d_o, o, lse, q, k, v, document_start);
}

}  // namespace kestrel::cuda
