// Which device a run uses, and what it computes in there.
#pragma once

#include "kernels/core/tensor.h"
#include "src/config/run_config.h"
#include "src/model/model.h"

namespace kestrel {

// `auto` takes the GPU where the program has the back end and the machine a device; `cuda` without one is a
// DeviceError.
Device choose_device(const TrainConfig& config);

// Bytes of memory it has in all.  The CPU's: the machine's, or what a control group or `ulimit -v` leaves this process.
int64_t device_memory(Device device);

// The CPU computes in fp32 whatever train.precision says; start-up lines say so.
DType working_dtype(const TrainConfig& config, Device device);

// Whether the gradients of several micro-batches meet in fp64 (ParameterStore::fold_gradients).
bool sums_gradients(const TrainConfig& config, Device device);

// How the passes of a run on `device` are made.
Model::PassOptions pass_options(const TrainConfig& config, Device device);

}  // namespace kestrel
