// CPU side of the router.  Included by this room only.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/router/router.h"

namespace kestrel::cpu {

// Rows of one piece of work; the scratch of route_forward has one line per piece.
constexpr int64_t kRouteGrain = 64;

// s[i] = sigmoid(logits[i]).  The one place where a score is made: routing, histogram and margins see the same bits.
void scores(float* s, const float* logits, int64_t n);

// An integer with the order of the floats: a < b as floats <=> order_key(a) < order_key(b); -0 ties with +0, and a NaN
// is below everything.
inline int32_t order_key(float v) {
  const int32_t b = std::bit_cast<int32_t>(v + 0.f);
  const int32_t key = b ^ ((b >> 31) & 0x7fffffff);
  return v != v ? std::numeric_limits<int32_t>::min() : key;
}
inline float value_of_key(int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}

// Scratch: [pieces, 2 capacity] I32 and [pieces, capacity] F32, capacity = list_capacity(r).
inline int64_t list_capacity(const Routing& r) {
  return r.threshold ? r.slots : (r.k < r.experts ? r.k + 1 : r.k);
}
void route_forward(const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid, Tensor list, Tensor list_scores);
void route_backward(const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score);
// partial [pieces] F32, pieces of kRouteGrain rows.
void aux_loss(float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits, Tensor load, int64_t k,
              Tensor valid, Tensor partial);

}  // namespace kestrel::cpu
