// Weights in and out under the names of the public K3 checkpoint.
//
// Reading is strict: every tensor of the model must be there with its shape, and nothing else may be.  Accepted forms:
// F32, BF16, F16; MXFP4 pairs (X.weight_packed, X.weight_scale); an A_log longer than the heads whose tail is exactly
// zero (as published).  Every value must be finite.  MLA output gates, biases and so on need no renaming: Kestrel's
// names are the checkpoint's.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/hf.h"
#include "src/model/parameters.h"

namespace kestrel {

// Fills master (and working) weights; of a store that is not allocated, reads and checks all the same.  DataError names
// up to five missing, unexpected or misshapen tensors, or the first with a value that is not finite.
void load_weights(ParameterStore& store, const WeightSource& source);
// The same from a checkpoint, which holds them as they are.
void load_weights(ParameterStore& store, const LoadedCheckpoint& checkpoint);

// DataError when a F32 tensor read from `where` holds a NaN or an infinity.
void check_finite(const std::string& where, const std::string& name, const Tensor& t);

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
