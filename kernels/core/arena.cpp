#include "kernels/core/arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/core/device.h"
#include "kernels/core/device_cuda.h"

namespace kestrel {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kPlannerCapacity = int64_t{1} << 60;

int64_t align_up(int64_t n) {
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

Tensor make(void* p, std::initializer_list<int64_t> shape, DType dtype, Device device) {
  return Tensor(p, shape, dtype, device);
}

constexpr const char* kLess =
    "Lower train.micro_batch_size, data.sequence_length, model.hidden_size, model.num_hidden_layers or "
    "model.vocab_size (of a benchmark: --shape), or set train.recompute to \"block\".";

int64_t bytes_of(std::initializer_list<int64_t> shape, DType dtype) {
  int64_t n = size_of(dtype);
  bool beyond = false;
  for (int64_t d : shape) beyond = __builtin_mul_overflow(n, d, &n) || beyond;
  if (!beyond && n <= kPlannerCapacity) return n;
  std::string sizes;
  for (int64_t d : shape) sizes += text(sizes.empty() ? "" : " x ", d);
  throw DeviceError(text("a tensor of ", sizes, " elements of ", size_of(dtype),
                         " bytes is larger than any memory (2^60 bytes are the most that can be planned). ", kLess));
}

// What the system can hold: a larger arena would be granted here, and the process killed when it is used.
int64_t host_memory() {
  struct sysinfo s {};
  if (sysinfo(&s) != 0) return INT64_MAX;
  return static_cast<int64_t>((s.totalram + s.totalswap) * s.mem_unit);
}

char* reserve_host(int64_t bytes) {
  if (bytes > host_memory()) {
    throw DeviceError(
        text("cannot reserve ", bytes, " bytes of host memory: the machine has ", host_memory(), ". ", kLess));
  }
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw DeviceError(text("cannot reserve ", bytes, " bytes of host memory: ", std::strerror(errno), ". ", kLess));
  }
  return static_cast<char*>(p);
}

char* reserve(Device device, int64_t bytes) {
  if constexpr (kBuiltWithCuda) {
    if (device == Device::cuda) return static_cast<char*>(cuda::allocate(bytes, "activations"));
  }
  KESTREL_CHECK(device == Device::cpu, "no ", name_of(device), " arena in this build");
  return reserve_host(bytes);
}

void give_back(Device device, char* base, int64_t bytes) {
  if constexpr (kBuiltWithCuda) {
    if (device == Device::cuda) return cuda::release(base);
  }
  munmap(base, static_cast<size_t>(bytes));
}

}  // namespace

Arena::Arena(Device device, int64_t capacity) : device_(device), capacity_(align_up(capacity)) {
  base_ = reserve(device, capacity_ ? capacity_ : kAlignment);
  top_ = capacity_;
}

Arena Arena::planner(Device device) {
  Arena a;
  a.device_ = device;
  a.planning_ = true;
  a.base_ = reinterpret_cast<char*>(kAlignment);  // never dereferenced
  a.capacity_ = a.top_ = kPlannerCapacity;
  return a;
}

Arena::Arena(Arena&& o) noexcept
    : device_(o.device_),
      planning_(o.planning_),
      base_(std::exchange(o.base_, nullptr)),
      capacity_(o.capacity_),
      bottom_(o.bottom_),
      top_(o.top_),
      peak_(o.peak_),
      pieces_(std::move(o.pieces_)),
      now_(std::move(o.now_)),
      at_peak_(std::move(o.at_peak_)) {}

Arena::~Arena() {
  if (base_ && !planning_) give_back(device_, base_, capacity_ ? capacity_ : kAlignment);
}

void* Arena::take(int64_t bytes, bool from_bottom) {
  bytes = align_up(bytes);
  if (planning_ && bytes > top_ - bottom_) {
    throw DeviceError(text(bottom_, " bytes and ", bytes,
                           " more are wanted, larger than any memory (2^60 bytes are the ",
                           "most that can be planned). ", kLess));
  }
  KESTREL_CHECK(bytes <= top_ - bottom_, "arena of ", capacity_, " bytes is full: ", bottom_, " kept, ",
                capacity_ - top_, " in use as scratch, ", bytes, " wanted; the plan of this step was too small");
  if (from_bottom) {
    void* p = base_ + bottom_;
    bottom_ += bytes;
    return p;
  }
  top_ -= bytes;
  return base_ + top_;
}

void Arena::note_peak() {
  const int64_t used = bottom_ + (capacity_ - top_);
  if (used <= peak_) return;
  peak_ = used;
  if (!planning_) return;
  at_peak_ = now_;
  at_peak_["scratch"] = capacity_ - top_;
}

Tensor Arena::keep(std::initializer_list<int64_t> shape, DType dtype, const char* purpose) {
  const int64_t bytes = bytes_of(shape, dtype);
  void* p = take(bytes, true);
  pieces_.push_back({bottom_, purpose, align_up(bytes)});
  now_[purpose] += align_up(bytes);
  note_peak();
  return make(p, shape, dtype, device_);
}

Tensor Arena::temp(std::initializer_list<int64_t> shape, DType dtype) {
  void* p = take(bytes_of(shape, dtype), false);
  note_peak();
  return make(p, shape, dtype, device_);
}

void Arena::release_keep(int64_t mark) {
  KESTREL_CHECK(mark <= bottom_, "released to ", mark, " above the bottom ", bottom_);
  while (!pieces_.empty() && pieces_.back().end > mark) {
    now_[pieces_.back().purpose] -= pieces_.back().bytes;
    pieces_.pop_back();
  }
  bottom_ = mark;
}

void Arena::release_temp(int64_t mark) {
  KESTREL_CHECK(mark >= top_, "released to ", mark, " below the top ", top_);
  top_ = mark;
}

}  // namespace kestrel
