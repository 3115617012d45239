#include "kernels/core/transfer.h"

#include <cstring>
#include <new>
#include <utility>

#include "kernels/core/device.h"
#include "kernels/core/device_cuda.h"

namespace kestrel {
namespace {

constexpr std::align_val_t kAlignment{256};

void check_pair(const Stream& s, const Tensor& device, const Tensor& host) {
  KESTREL_CHECK(device.dtype == host.dtype && device.rows() == host.rows() && device.cols() == host.cols(),
                "transfer between ", host.describe(), " and ", device.describe());
  KESTREL_CHECK(host.device == Device::cpu && device.device == s.device(), "transfer between ", host.describe(),
                " and ", device.describe(), " on a stream of ", name_of(s.device()));
}

void copy(Stream& s, const Tensor& to, const Tensor& from) {
  const int64_t size = size_of(to.dtype), row = to.cols() * size;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      return cuda::copy_rows(s.queue, to.data, to.ld * size, from.data, from.ld * size, row, to.rows());
    }
  }
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end in this build");
  for (int64_t r = 0; r < to.rows(); ++r) {
    std::memmove(static_cast<char*>(to.data) + r * to.ld * size,
                 static_cast<const char*>(from.data) + r * from.ld * size, static_cast<size_t>(row));
  }
}

}  // namespace

void upload(Stream& s, Tensor device, const Tensor& host) {
  check_pair(s, device, host);
  if (s.planning()) return;
  copy(s, device, host);
}

void download(Stream& s, Tensor host, const Tensor& device) {
  check_pair(s, device, host);
  if (s.planning()) return;
  copy(s, host, device);
}

Tensor on_host(Stream& s, Tensor t, std::vector<char>& memory) {
  if (t.device == Device::cpu) return t;
  memory.resize(static_cast<size_t>(t.bytes()));
  Tensor host = t;
  host.device = Device::cpu;
  host.data = memory.data();
  host.ld = host.cols();
  download(s, host, t);
  wait(s);
  return host;
}

PinnedBuffer::PinnedBuffer(Device device, int64_t bytes) : device_(device), bytes_(bytes) {
  if constexpr (kBuiltWithCuda) {
    if (device == Device::cuda) {
      data_ = static_cast<char*>(cuda::allocate_pinned(bytes));
      return;
    }
  }
  KESTREL_CHECK(device == Device::cpu, "no ", name_of(device), " back end in this build");
  data_ = static_cast<char*>(::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), kAlignment));
}

PinnedBuffer::~PinnedBuffer() {
  if (!data_) return;
  if constexpr (kBuiltWithCuda) {
    if (device_ == Device::cuda) {
      cuda::release_pinned(data_);
      return;
    }
  }
  ::operator delete(data_, kAlignment);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& o) noexcept
    : device_(o.device_), data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

Tensor PinnedBuffer::tensor(std::initializer_list<int64_t> shape, DType dtype) const {
  const Tensor t(data_, shape, dtype);
  KESTREL_CHECK(t.bytes() <= bytes_, "a pinned buffer of ", bytes_, " bytes seen as ", t.describe());
  return t;
}

}  // namespace kestrel
