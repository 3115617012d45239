// A number that an operation takes: known when the operation is queued, or read from the stream's device when it runs.
// The second kind may change between the replays of a recording (recording.h).
#pragma once

#include "kernels/core/tensor.h"

namespace kestrel {

class Scalar {
 public:
  Scalar(float value) : value_(value) {}  // NOLINT: a float is one
  // A contiguous F32 tensor of one element, which must live until the operation has run.
  static Scalar in(const Tensor& t) {
    KESTREL_CHECK(t.dtype == DType::f32 && t.numel() == 1, "a scalar is one F32, got ", t.describe());
    Scalar s(0.f);
    s.memory_ = t.f32();
    return s;
  }

  // For CUDA kernels, which read *memory when it is there.
  const float* memory() const { return memory_; }
  float value() const { return value_; }
  // For the CPU back end.
  float now() const { return memory_ ? *memory_ : value_; }

 private:
  float value_;
  const float* memory_ = nullptr;
};

}  // namespace kestrel
