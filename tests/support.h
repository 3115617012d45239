// What every test needs: golden fixtures, owned tensors, an error measure, a stream.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/core/stream.h"
#include "src/checkpoint/safetensors.h"

namespace kestrel::test {

// An owned host tensor whose memory is poisoned with NaN before first use and fenced by poisoned margins that are
// checked on destruction: an operation that leaves an element unwritten or writes outside shows up.
class Buffer {
 public:
  Buffer(std::initializer_list<int64_t> shape, DType t = DType::f32) {
    Tensor probe(nullptr, shape, t);
    bytes_ = static_cast<size_t>(probe.bytes());
    memory_.assign(bytes_ + 2 * kFence, static_cast<char>(0xff));  // 0xffffffff is a NaN in F32 and -1 in I32
    tensor_ = Tensor(memory_.data() + kFence, shape, t);
  }
  ~Buffer() {
    for (size_t i = 0; i < kFence; ++i) {
      if (memory_[i] != static_cast<char>(0xff) || memory_[kFence + bytes_ + i] != static_cast<char>(0xff)) {
        ADD_FAILURE() << "memory around a tensor " << tensor_.describe() << " was written";
        break;
      }
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator Tensor() const { return tensor_; }
  Tensor operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  float* f() const { return tensor_.f32(); }
  float& operator[](int64_t i) const { return tensor_.f32()[i]; }
  Buffer& zero() {
    std::memset(tensor_.data, 0, bytes_);
    return *this;
  }
  Buffer& copy(const Tensor& from) {
    EXPECT_EQ(from.bytes(), static_cast<int64_t>(bytes_));
    std::memcpy(tensor_.data, from.data, bytes_);
    return *this;
  }
  // N(0, std) from a fixed seed.
  Buffer& normal(uint64_t seed, float std = 1.f, float mean = 0.f) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> d(mean, std);
    for (int64_t i = 0; i < tensor_.numel(); ++i) tensor_.f32()[i] = d(rng);
    return *this;
  }

 private:
  static constexpr size_t kFence = 256;
  size_t bytes_ = 0;
  std::vector<char> memory_;
  Tensor tensor_;
};

inline SafetensorsFile fixture(const std::string& name) {
  return SafetensorsFile(std::string(KESTREL_FIXTURES) + "/" + name + ".safetensors");
}

// ||a - b|| / ||b|| in fp64; a NaN gives NaN, which fails every EXPECT_LE.  b = 0 everywhere: ||a||.
inline double relative_error(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.numel(), b.numel());
  double d = 0, n = 0;
  for (int64_t r = 0; r < a.rows(); ++r) {
    // rows of a and b may be cut differently; go by flat index for contiguous tensors
    for (int64_t c = 0; c < a.cols(); ++c) {
      const int64_t flat = r * a.cols() + c;
      const double x = a.f32()[r * a.ld + c];
      const double y = b.f32()[(flat / b.cols()) * b.ld + flat % b.cols()];
      d += (x - y) * (x - y);
      n += y * y;
    }
  }
  return n > 0 ? std::sqrt(d / n) : std::sqrt(d);
}

// A CPU stream with an arena of its own.
class CpuStream {
 public:
  explicit CpuStream(int64_t bytes = int64_t{1} << 30) : arena_(Device::cpu, bytes), stream_(arena_) {}
  operator Stream&() { return stream_; }
  Stream& operator*() { return stream_; }
  Arena& arena() { return arena_; }

 private:
  Arena arena_;
  Stream stream_;
};

}  // namespace kestrel::test
