// What the tests of the CUDA back end need: device memory that is poisoned and fenced, a stream, comparisons.
//
// Every test here has the same form: fill host buffers, round them to the dtype under test, run the CPU function on
// them and the CUDA function on their copies, compare.  So the bound of a comparison is the rounding of the outputs
// (tolerance(dtype)) plus what the order of a sum may change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/core/device.h"
#include "kernels/core/device_cuda.h"
#include "tests/support.h"

namespace kestrel::test {

// Bound on ||got - want|| / ||want||.  F32: two correct evaluations of sums of up to some thousand terms in another
// order differ by a few 1e-6.  BF16: rounding an output to 8 bits moves it by at most 2^-9 = 2.0e-3 of itself, and by
// 1.1e-3 in the mean square; 3e-3 leaves room for a second rounding and none for a lost bit.
inline double tolerance(DType t) {
  return t == DType::bf16 ? 3e-3 : 1e-5;
}

inline float rounded(float x, DType t) {
  return t == DType::bf16 ? static_cast<float>(bf16(x)) : x;
}
// Rounds an F32 host tensor in place, so that host and device compute from the same numbers.
inline void round_to(DType t, const Tensor& host) {
  for (int64_t r = 0; r < host.rows(); ++r)
    for (int64_t c = 0; c < host.cols(); ++c) host.f32()[r * host.ld + c] = rounded(host.f32()[r * host.ld + c], t);
}

// A tensor in device memory, filled with 0xff (a NaN in F32 and BF16, -1 in I32).  Everything around it, the padding
// columns of every row included, must still be 0xff when it goes.
class DeviceBuffer {
 public:
  // `left` and `right` columns of padding make a column block: ld = left + cols + right.
  explicit DeviceBuffer(std::initializer_list<int64_t> shape, DType dtype = DType::f32, int64_t left = 0,
                        int64_t right = 0) {
    tensor_ = Tensor(nullptr, shape, dtype, Device::cuda);
    tensor_.ld = left + tensor_.cols() + right;
    first_ = kFence + left * size_of(dtype);
    image_.assign(static_cast<size_t>(2 * kFence + tensor_.rows() * tensor_.ld * size_of(dtype)),
                  static_cast<char>(0xff));
    memory_ = static_cast<char*>(cuda::allocate(bytes(), "a test"));
    tensor_.data = memory_ + first_;
    poison();
  }
  // A copy of a host tensor: F32 converted to dtype, I32 as it is.
  DeviceBuffer(const Tensor& host, DType dtype, int64_t left = 0, int64_t right = 0)
      : DeviceBuffer({host.rows(), host.cols()}, dtype, left, right) {
    upload(host);
  }
  ~DeviceBuffer() {
    check_fence();
    cuda::release(memory_);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  operator Tensor() const { return tensor_; }
  Tensor operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

  DeviceBuffer& poison() {
    std::fill(image_.begin(), image_.end(), static_cast<char>(0xff));
    put();
    return *this;
  }
  DeviceBuffer& zero() {
    for (int64_t r = 0; r < tensor_.rows(); ++r) {
      std::memset(row(r), 0, static_cast<size_t>(tensor_.cols() * size_of(tensor_.dtype)));
    }
    put();
    return *this;
  }
  DeviceBuffer& upload(const Tensor& host) {
    EXPECT_EQ(host.rows(), tensor_.rows());
    EXPECT_EQ(host.cols(), tensor_.cols());
    for (int64_t r = 0; r < tensor_.rows(); ++r) {
      char* to = row(r);
      if (tensor_.dtype == host.dtype) {
        const int64_t size = size_of(host.dtype);
        std::memcpy(to, static_cast<const char*>(host.data) + r * host.ld * size,
                    static_cast<size_t>(host.cols() * size));
        continue;
      }
      EXPECT_TRUE(tensor_.dtype == DType::bf16 && host.dtype == DType::f32);
      for (int64_t c = 0; c < host.cols(); ++c) {
        const bf16 x(host.f32()[r * host.ld + c]);
        std::memcpy(to + 2 * c, &x, 2);
      }
    }
    put();
    return *this;
  }
  // The elements in row order, as float.
  std::vector<float> values() const {
    get();
    std::vector<float> v;
    v.reserve(static_cast<size_t>(tensor_.numel()));
    for (int64_t r = 0; r < tensor_.rows(); ++r) {
      for (int64_t c = 0; c < tensor_.cols(); ++c) v.push_back(element(r, c));
    }
    return v;
  }
  // The bytes of the elements in row order: for comparisons of bits.
  std::vector<char> raw() const {
    get();
    const size_t n = static_cast<size_t>(tensor_.cols() * size_of(tensor_.dtype));
    std::vector<char> v;
    for (int64_t r = 0; r < tensor_.rows(); ++r) v.insert(v.end(), row(r), row(r) + n);
    return v;
  }

 private:
  static constexpr int64_t kFence = 256;
  int64_t bytes() const { return static_cast<int64_t>(image_.size()); }
  char* row(int64_t r) const { return image_.data() + first_ + r * tensor_.ld * size_of(tensor_.dtype); }
  void put() const {
    cuda::copy_rows(nullptr, memory_, bytes(), image_.data(), bytes(), bytes(), 1);
    cuda::wait(nullptr);
  }
  void get() const {
    cuda::copy_rows(nullptr, image_.data(), bytes(), memory_, bytes(), bytes(), 1);
    cuda::wait(nullptr);
  }
  float element(int64_t r, int64_t c) const {
    const char* p = row(r) + c * size_of(tensor_.dtype);
    if (tensor_.dtype == DType::bf16) {
      bf16 x;
      std::memcpy(&x, p, 2);
      return static_cast<float>(x);
    }
    if (tensor_.dtype == DType::i32) {
      int32_t x;
      std::memcpy(&x, p, 4);
      return static_cast<float>(x);
    }
    EXPECT_EQ(tensor_.dtype, DType::f32);
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  void check_fence() const {
    get();
    std::vector<char> outside = image_;
    const size_t n = static_cast<size_t>(tensor_.cols() * size_of(tensor_.dtype));
    for (int64_t r = 0; r < tensor_.rows(); ++r) {
      std::memset(outside.data() + (row(r) - image_.data()), 0xff, n);
    }
    const auto bad = std::find_if(outside.begin(), outside.end(), [](char x) { return x != static_cast<char>(0xff); });
    if (bad != outside.end()) {
      ADD_FAILURE() << "memory around device tensor " << tensor_.describe() << " was written, "
                    << bad - outside.begin() - first_ << " bytes from its first element";
    }
  }

  mutable std::vector<char> image_;
  int64_t first_ = 0;
  char* memory_ = nullptr;
  Tensor tensor_;
};

// A queue on device 0.  `run` first lets the operation plan over a counting arena, then gives it exactly the memory it
// asked for, poisoned: scratch that was not counted, or is read before it is written, shows.
class CudaStream {
 public:
  CudaStream() : queue_((use_device(0), Device::cuda)) {}

  void run(const std::function<void(Stream&)>& f) {
    Arena planner = Arena::planner(Device::cuda);
    Stream plan(planner);
    f(plan);
    Arena arena(Device::cuda, planner.peak());
    if (planner.peak() > 0) {
      const std::vector<char> poison(static_cast<size_t>(planner.peak()), static_cast<char>(0xff));
      const int64_t n = planner.peak();
      const Tensor all = arena.temp({n}, DType::u8);
      cuda::copy_rows(nullptr, all.data, n, poison.data(), n, n, 1);
      cuda::wait(nullptr);
      arena.release_temp(arena.capacity());
    }
    Stream s(arena);
    s.queue = queue_.get();
    f(s);
    wait(s);
    scratch_ = planner.peak();
  }
  int64_t scratch() const { return scratch_; }  // bytes the last run took from the arena

 private:
  DeviceQueue queue_;
  int64_t scratch_ = 0;
};

// got (device) against want (F32 host): the relative error of the whole is at most `bound`, and no element is off by
// more than `bound` times the largest element of want plus 8 times `bound` times its own size.  Says where it is worst.
inline void expect_close(const char* name, const DeviceBuffer& got, const Tensor& want, double bound) {
  ASSERT_EQ(got->numel(), want.numel()) << name;
  const std::vector<float> g = got.values();
  double difference = 0, norm = 0, largest = 0, worst = -1;
  int64_t worst_at = 0, not_finite = 0;
  for (int64_t i = 0; i < want.numel(); ++i) {
    largest = std::max(largest, std::fabs(double{want.f32()[i / want.cols() * want.ld + i % want.cols()]}));
  }
  for (int64_t i = 0; i < want.numel(); ++i) {
    const double w = want.f32()[i / want.cols() * want.ld + i % want.cols()];
    const double x = g[static_cast<size_t>(i)], d = std::fabs(x - w);
    not_finite += !std::isfinite(x);
    difference += d * d;
    norm += w * w;
    const double excess = d - bound * (largest + 8 * std::fabs(w));
    if (worst < 0 ? d > 0 && excess > worst : excess > worst) {
      worst = excess;
      worst_at = i;
    }
  }
  const double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  if (error <= bound && worst <= 0) return;
  const auto wanted = [&](int64_t i) { return want.f32()[i / want.cols() * want.ld + i % want.cols()]; };
  std::string sample;
  int shown = 0;
  for (int64_t i = 0; i < want.numel() && shown < 6; ++i) {
    const double x = g[static_cast<size_t>(i)], w = wanted(i);
    if (std::fabs(x - w) <= bound * (largest + 8 * std::fabs(w))) continue;
    sample += text(" [", i / want.cols(), ",", i % want.cols(), "] ", x, " for ", w, ";");
    ++shown;
  }
  ADD_FAILURE() << name << " " << got->describe() << ": relative error " << error << ", bound " << bound
                << "; worst at [" << worst_at / want.cols() << "," << worst_at % want.cols()
                << "]: " << g[static_cast<size_t>(worst_at)] << " for " << wanted(worst_at) << "; " << not_finite
                << " not finite; largest wanted " << largest << "; first bad:" << sample;
}

inline Tensor device_vector(const DeviceBuffer& b) {
  return b->view({b->numel()});
}

// The elements of an I32 host tensor in row order.
inline std::vector<int32_t> integers(const Tensor& t) {
  std::vector<int32_t> v;
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) v.push_back(t.i32()[r * t.ld + c]);
  }
  return v;
}

// Integers, or floats that must agree exactly.
inline void expect_equal(const char* name, const DeviceBuffer& got, const std::vector<int32_t>& want) {
  const std::vector<float> g = got.values();
  ASSERT_EQ(g.size(), want.size()) << name;
  for (size_t i = 0; i < g.size(); ++i) {
    if (g[i] != static_cast<float>(want[i])) {
      ADD_FAILURE() << name << "[" << i << "] is " << g[i] << ", expected " << want[i];
      return;
    }
  }
}

inline void expect_same_bits(const char* name, const DeviceBuffer& a, const DeviceBuffer& b) {
  const std::vector<char> x = a.raw(), y = b.raw();
  ASSERT_EQ(x.size(), y.size()) << name;
  const auto at = std::mismatch(x.begin(), x.end(), y.begin()).first - x.begin();
  EXPECT_EQ(static_cast<size_t>(at), x.size())
      << name << ": first difference in element " << at / size_of(a->dtype) << " of " << a->describe();
}

}  // namespace kestrel::test
