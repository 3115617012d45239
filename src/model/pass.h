// One micro-batch on its way through the model: its size, its precision, and where activations go.
#pragma once

#include "kernels/core/stream.h"
#include "src/config/run_config.h"

namespace kestrel {

using Recompute = TrainConfig::Recompute;

struct Pass {
  explicit Pass(Stream& stream) : s(stream) {}

  Stream& s;
  int64_t B = 0, T = 0;
  DType dtype = DType::f32;  // of activations
  Tensor document_start;     // I32 [B,T], or empty: a row is one document
  Recompute recompute = Recompute::none;
  bool keep = true;  // this forward's activations wait for a backward (false: evaluation, or a recomputation)
  double batch_share =
      1.0;              // tokens of this micro-batch over tokens of the global batch (weight of the auxiliary loss)
  bool observe = true;  // loads and quantile statistics count this forward (false: evaluation, recomputation)

  int64_t N() const { return B * T; }

  // Activations that backward needs.  Kept ones come from the arena's bottom, all others are scratch of the sublayer.
  Tensor save(std::initializer_list<int64_t> shape, DType t, const char* purpose) const {
    return keep && recompute != Recompute::block ? s.arena->keep(shape, t, purpose) : s.temp(shape, t);
  }
  // Those that a pointwise operation rebuilds from saved ones.
  Tensor save_pointwise(std::initializer_list<int64_t> shape, DType t, const char* purpose) const {
    return keep && recompute == Recompute::none ? s.arena->keep(shape, t, purpose) : s.temp(shape, t);
  }
  // The pass that rebuilds a sublayer's activations inside its backward: everything is scratch, nothing is counted
  // again.
  Pass recomputing() const {
    Pass p = *this;
    p.keep = p.observe = false;
    return p;
  }
};

}  // namespace kestrel
