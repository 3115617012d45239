// The operations that `kestrel bench op` times.  Included by this room only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/core/stream.h"
#include "src/bench/op_benchmark.h"

namespace kestrel {

// Makes the tensors of one case in the stream's arena; on a planner they are only counted.
class OpOperands {
 public:
  OpOperands(Stream& s, DType dtype);
  DType dtype() const { return dtype_; }  // of activations
  Device device() const { return s_.device(); }
  Stream& stream() { return s_; }

  Tensor noise(int64_t rows, int64_t cols) { return noise(rows, cols, dtype_); }  // N(0, 1)
  Tensor noise(int64_t rows, int64_t cols, DType dtype);
  Tensor zeros(int64_t rows, int64_t cols) { return zeros(rows, cols, dtype_); }
  Tensor zeros(int64_t rows, int64_t cols, DType dtype);
  Tensor vector(int64_t n) { return noise(1, n, DType::f32).view({n}); }
  Tensor zero_vector(int64_t n, DType dtype = DType::f32) { return zeros(1, n, dtype).view({n}); }
  Tensor integers(int64_t n, const std::function<int64_t(int64_t)>& value);

 private:
  Stream& s_;
  DType dtype_;
  Tensor noise_;
};

struct OpCase {
  double bytes = 0, flops = 0;
  std::function<void(Stream&)> call;
};

struct OpDim {
  std::string name;
  int64_t gpu, cpu;                       // default sizes
  int64_t most = (int64_t{1} << 31) - 1;  // the kernels' limit, or the run file's
};

struct OpEntry {
  std::string name;
  std::vector<OpDim> dims;
  std::function<OpCase(OpOperands&, const OpShape&)> make;
  std::function<std::string(const OpShape&)> check = nullptr;  // what is wrong with a shape; empty: nothing
};

const std::vector<OpEntry>& op_table();

}  // namespace kestrel
