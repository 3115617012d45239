#include "kernels/core/recording.h"

#include "kernels/core/device_cuda.h"

namespace kestrel {

Recording::~Recording() {
  if constexpr (kBuiltWithCuda) {
    if (graph_) cuda::destroy_recording(graph_);
  }
}

void Recording::run(Stream& s, const std::function<void()>& work) {
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda && !s.planning() && !s.profiler && warm_) {
      if (!graph_) {
        cuda::begin_recording(s.queue);
        try {
          work();
        } catch (...) {
          cuda::drop_recording(s.queue);
          throw;
        }
        graph_ = cuda::end_recording(s.queue);
      }
      return cuda::replay(graph_, s.queue);
    }
  }
  work();
  warm_ = !s.planning();
}

}  // namespace kestrel
