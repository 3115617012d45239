// Where an operation runs: a device, its queue, and the arena its scratch comes from.
#pragma once

#include "kernels/core/arena.h"

namespace kestrel {

class Profiler;

struct Stream {
  Arena* arena = nullptr;
  void* queue = nullptr;         // cudaStream_t on the CUDA back end
  Profiler* profiler = nullptr;  // adds up the time of each operation (profile.h), or nobody does

  explicit Stream(Arena& a) : arena(&a) {}

  Device device() const { return arena->device(); }
  // True while the model is only being measured: an operation allocates its scratch, then returns.
  bool planning() const { return arena->planning(); }
  Tensor temp(std::initializer_list<int64_t> shape, DType dtype = DType::f32) { return arena->temp(shape, dtype); }
};

// Gives back the scratch taken since its construction.
class ScratchScope {
 public:
  explicit ScratchScope(Stream& s) : arena_(s.arena), mark_(s.arena->temp_mark()) {}
  ~ScratchScope() { arena_->release_temp(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

 private:
  Arena* arena_;
  int64_t mark_;
};

// Bytes of arena that `fn(stream)` needs, found by running it over a planner.
template <class F>
int64_t planned_bytes(Device device, F&& fn) {
  Arena planner = Arena::planner(device);
  Stream s(planner);
  fn(s);
  return planner.peak();
}

}  // namespace kestrel
