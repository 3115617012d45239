// The CPU side of kernels/short_conv.  Shapes as in short_conv.h, checked by the caller.
#pragma once

#include "kernels/core/tensor.h"

namespace kestrel::cpu {

constexpr int64_t kMaxConvWidth = 8;
constexpr int64_t kConvRowsPerPiece = 64;

// Pieces of time of one step: the weight gradient is summed per piece, then over pieces in order.
inline int64_t conv_pieces(int64_t B, int64_t T) {
  return B * ((T + kConvRowsPerPiece - 1) / kConvRowsPerPiece);
}

struct ConvInput {
  int64_t B, T;
  Tensor x, weight, document_start, history;  // the last two may be empty
};

void short_conv_forward(const ConvInput& in, const Tensor& y);
// partial [conv_pieces(B, T), W, C] is scratch.
void short_conv_backward(const ConvInput& in, const Tensor& dx, float* dweight, const Tensor& dy, float* partial);

}  // namespace kestrel::cpu
