// Memory of one device, planned before the first step.
//
// An arena has two ends.  `keep` takes from the bottom: what lives until its mark is released (activations saved for
// backward, gradients of activations).  `temp` takes from the top: scratch of one operation or one layer.  Both ends
// are stacks with marks, so a step allocates nothing from the system.
//
// A planner (`Arena::planner`) hands out addresses that must not be touched and only counts; the model is run over it
// once to learn the size of the real arena.  Operations return before they compute when `Stream::planning()` is true.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "kernels/core/tensor.h"

namespace kestrel {

class Arena {
 public:
  Arena(Device device, int64_t capacity);  // throws DeviceError when the memory cannot be had
  static Arena planner(Device device);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Tensor keep(std::initializer_list<int64_t> shape, DType dtype, const char* purpose);
  Tensor temp(std::initializer_list<int64_t> shape, DType dtype);

  int64_t keep_mark() const { return bottom_; }
  int64_t temp_mark() const { return top_; }
  void release_keep(int64_t mark);
  void release_temp(int64_t mark);

  bool planning() const { return planning_; }
  Device device() const { return device_; }
  int64_t capacity() const { return capacity_; }
  int64_t peak() const { return peak_; }  // bytes, both ends, over the arena's life
  const std::map<std::string, int64_t>& by_purpose() const {
    return at_peak_;
  }  // bytes at the moment of the peak; "scratch" = the top end

 private:
  Arena() = default;
  void* take(int64_t bytes, bool from_bottom);
  void note_peak();

  Device device_ = Device::cpu;
  bool planning_ = false;
  char* base_ = nullptr;
  int64_t capacity_ = 0, bottom_ = 0, top_ = 0, peak_ = 0;
  struct Piece {
    int64_t end;
    const char* purpose;
    int64_t bytes;
  };
  std::vector<Piece> pieces_;
  std::map<std::string, int64_t> now_, at_peak_;
};

}  // namespace kestrel
