// The dense feed-forward: y = GLU(x W_gate^T, x W_up^T) W_down^T.  Also the shared expert of a MoE layer.
#pragma once

#include <string>

#include "kernels/glu/glu.h"
#include "src/model/parameters.h"
#include "src/model/sublayer.h"

namespace kestrel {

Glu glu_of(const ModelConfig& config);

class FfnLayer : public Sublayer {
 public:
  FfnLayer(const ModelConfig& config, ParameterStore& store, const std::string& prefix, int64_t width);
  void forward(const Pass& pass, Tensor y, Tensor x) override;
  void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) override;

 private:
  void activate(const Pass& pass);

  int64_t D_, F_;
  Glu glu_;
  Block *gate_up_, *down_;
  struct Activations {
    Tensor gate_up;  // [N, 2F]
    Tensor h;        // [N, F] (pointwise)
  } a_;
};

}  // namespace kestrel
