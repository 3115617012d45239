// The CPU side of optimizer.h on raw pointers.
#pragma once

#include <cstdint>

#include "kernels/optimizer/optimizer.h"

namespace kestrel::cpu {

void adamw(const AdamW& h, int64_t n, float* p, const float* g, float* m, float* v, float grad_scale);

// Where Newton-Schulz works: `slots` matrices at a time, each with X and Y [short, long] and A and B [short, short].
// Both numbers follow from the shape alone, never from the thread count.
struct NewtonSchulzPlan {
  NewtonSchulzPlan(int64_t count, int64_t rows, int64_t cols);

  int64_t rows, cols;
  int64_t short_side, long_side;
  bool large;  // one matrix keeps all threads busy: matrices come one after the other
  int64_t slots;
  int64_t floats_per_slot() const { return 2 * short_side * (long_side + short_side); }
};

void newton_schulz(const NewtonSchulzPlan& plan, int64_t count, float* x, int steps, float* scratch);
void muon(const NewtonSchulzPlan& plan, const Muon& h, int64_t count, int64_t block_stride, float* p, const float* g,
          float* m, float grad_scale, float* scratch);

// In fp64 over pieces that depend on n only, summed in order.
double sum_of_squares(int64_t n, const float* x);

// row[j] *= factor over `rows` rows.
void scale_rows(int64_t rows, int64_t cols, float* x, int64_t ld, float factor);

// One row of n (a multiple of 32) elements; null outputs are not written.
void mxfp4_quantize_row(int64_t n, const float* w, uint8_t* packed, uint8_t* scale, float* dequantized);
void mxfp4_unpack_row(int64_t n, const uint8_t* packed, const uint8_t* scale, float* dequantized);

}  // namespace kestrel::cpu
