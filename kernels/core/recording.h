// A sequence of operations that is queued again and again with the same shapes and addresses: on a GPU it is recorded
// once as a CUDA graph and then launched as a whole, which costs the host microseconds for thousands of kernels.
//
//     Recording step;
//     step.run(s, [&] { model.train(s, ...); });
//
// The first run queues the work as it is (libraries choose algorithms and take their workspaces then), the second
// records it and launches the recording, every later one only launches.  So the work must be the same each time: what
// changes between runs lies in device memory (Scalar::in, ids uploaded before).  On the CPU, and while a profiler times
// single operations, the work runs as it is.  Results have the same bits either way.
#pragma once

#include <functional>

#include "kernels/core/stream.h"

namespace kestrel {

class Recording {
 public:
  Recording() = default;
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // DeviceError when the work cannot be recorded: it waited for the device or copied from ordinary host memory.
  void run(Stream& s, const std::function<void()>& work);

 private:
  bool warm_ = false;
  void* graph_ = nullptr;  // cudaGraphExec_t
};

}  // namespace kestrel
