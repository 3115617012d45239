// Weights in and out under the names of the public K3 checkpoint.
//
// Reading is strict: every tensor of the model must be there with its shape, and nothing else may be.  Accepted forms:
// F32, BF16, F16; MXFP4 pairs (X.weight_packed, X.weight_scale); an A_log longer than the heads whose tail is exactly
// zero (as published).  MLA output gates, biases and so on need no renaming: Kestrel's names are the checkpoint's.
#pragma once

#include "src/checkpoint/hf.h"
#include "src/model/parameters.h"

namespace kestrel {

// Fills master (and working) weights.  DataError names up to five missing, unexpected or misshapen tensors.
void load_weights(ParameterStore& store, const WeightSource& source);

// Views of the master weights under their names and shapes.
std::vector<NamedTensor> weights_of(const ParameterStore& store);

}  // namespace kestrel
