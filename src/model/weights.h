// Weights in and out under the names of the public K3 checkpoint.
//
// Reading is strict: every tensor of the model must be there with its shape, and nothing else may be.  Accepted forms:
// F32, BF16, F16; MXFP4 pairs (X.weight_packed, X.weight_scale); an A_log longer than the heads whose tail is exactly
// zero (as published).  MLA output gates, biases and so on need no renaming: Kestrel's names are the checkpoint's.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "src/checkpoint/hf.h"
#include "src/model/parameters.h"

namespace kestrel {

// Fills master (and working) weights.  DataError names up to five missing, unexpected or misshapen tensors.
void load_weights(ParameterStore& store, const WeightSource& source);

// Named tensors in host memory: views where they lie there already, copies of a device's otherwise.
class HostTensors {
 public:
  void add(Stream& s, const std::string& name, const std::vector<int64_t>& shape, Tensor t);
  const std::vector<NamedTensor>& list() const { return list_; }

 private:
  std::vector<NamedTensor> list_;
  std::deque<std::vector<char>> copies_;
};

// The master weights under their names and shapes.
HostTensors weights_of(Stream& s, const ParameterStore& store);
// On the CPU no stream is needed.
HostTensors weights_of(const ParameterStore& store);

}  // namespace kestrel
