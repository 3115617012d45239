// Where weights start: N(0, initializer_range); projections that write into the residual may start smaller,
// initializer_range / sqrt(2 num_hidden_layers), when model.scale_output_init says so.
#pragma once

#include <cmath>

#include "src/config/run_config.h"
#include "src/model/parameters.h"

namespace kestrel {

inline Init weight_init(const ModelConfig& c) {
  return {Init::Kind::normal, c.initializer_range};
}
inline Init output_init(const ModelConfig& c) {
  const double depth = c.scale_output_init ? std::sqrt(2.0 * static_cast<double>(c.num_hidden_layers)) : 1.0;
  return {Init::Kind::normal, c.initializer_range / depth};
}

}  // namespace kestrel
