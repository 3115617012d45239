// A sublayer maps the normalised mixed stream to an update of the residual:  y [N,D] = f(x [N,D]).
//
// forward fills the sublayer's activation struct; backward reads it (or rebuilds it, as train.recompute says: the
// rebuilt values have the same bits), overwrites dx and adds to the gradients of the sublayer's parameters.
#pragma once

#include "src/model/pass.h"

namespace kestrel {

class Sublayer {
 public:
  virtual ~Sublayer() = default;
  virtual void forward(const Pass& pass, Tensor y, Tensor x) = 0;
  virtual void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) = 0;
};

}  // namespace kestrel
