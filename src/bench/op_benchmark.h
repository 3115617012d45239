// How long one operation takes on this machine, beside what bounds it: the bytes it must move and the arithmetic it
// must do.
//
// Bytes are counted once per tensor that the operation has to read or write (a tensor that is added to counts twice);
// FLOPs are those of its matrix products.  The bound is the larger of bytes / (rate of a device copy) and FLOPs / (rate
// of a large matrix product), both rates measured in the same call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/tensor.h"

namespace kestrel {

struct OpShape {
  std::vector<std::pair<std::string, int64_t>> dims;  // in the order of the operation's table entry
  int64_t operator[](const std::string& name) const;
};

struct OpTiming {
  std::string name;
  OpShape shape;
  std::string device, dtype;
  double median_ms = 0;
  double spread = 0;  // (largest - smallest) / median over the samples
  double bytes = 0, flops = 0;
  double copy_rate = 0;     // bytes/s of a copy of 512 MiB (64 MiB on the CPU), read + written
  double product_rate = 0;  // FLOP/s of an 8192^3 product (1024^3 on the CPU) in the same dtype; 0: not needed
  double bound_ms() const;
  double fraction_of_bound() const { return median_ms > 0 ? bound_ms() / median_ms : 0; }
};

struct OpOptions {
  Device device = Device::cpu;
  DType dtype = DType::f32;  // of the activations; the CPU has F32 only
  int64_t samples = 9;       // each the mean of enough calls to last about 5 ms
};

// Names of the operations, in the order of the model.
std::vector<std::string> op_names();
// The shape an operation is timed at when nothing is said: bench_2p8b's, a small one on the CPU.
OpShape default_shape(const std::string& name, Device device);
// The default with "N=4096,D=512" applied.  Unknown operations and dimensions, and values below 1, are ConfigErrors.
OpShape parse_shape(const std::string& name, Device device, const std::string& given);

OpTiming benchmark_op(const std::string& name, const OpShape& shape, const OpOptions& options);

std::string timings_text(const std::vector<OpTiming>& timings);
std::string timings_json(const std::vector<OpTiming>& timings);

}  // namespace kestrel
