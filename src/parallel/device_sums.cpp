#include "src/parallel/device_sums.h"

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"

namespace kestrel {
namespace {

// fn(host tensor) between the way there and the way back.
template <class F>
void on_the_host(Stream& s, Communicator& ranks, const Tensor& t, F&& fn) {
  if (ranks.size() == 1 || s.planning() || !t || t.numel() == 0) return;
  KESTREL_CHECK(t.contiguous(), t.describe(), " is not contiguous");
  std::vector<char> memory;
  const Tensor host = on_host(s, t, memory);
  fn(host);
  if (t.device == Device::cpu) return;
  upload(s, t, host);
  wait(s);
}

template <class T>
std::span<T> span_of(const Tensor& t) {
  return {t.as<T>(), static_cast<size_t>(t.numel())};
}

}  // namespace

void sum_over(Stream& s, Communicator& ranks, Tensor t) {
  on_the_host(s, ranks, t, [&](const Tensor& host) {
    if (t.dtype == DType::i32) {
      ranks.sum(span_of<int32_t>(host));
    } else {
      ranks.sum(span_of<float>(host));
    }
  });
}

void max_over(Stream& s, Communicator& ranks, Tensor t) {
  on_the_host(s, ranks, t, [&](const Tensor& host) { ranks.max(span_of<float>(host)); });
}

void reduce_scatter(Stream& s, Communicator& ranks, Tensor flat, std::span<const int64_t> cuts) {
  on_the_host(s, ranks, flat, [&](const Tensor& host) {
    if (flat.dtype == DType::f64) {
      ranks.reduce_scatter(span_of<double>(host), cuts);
    } else {
      ranks.reduce_scatter(span_of<float>(host), cuts);
    }
  });
}

void all_gather(Stream& s, Communicator& ranks, Tensor flat, std::span<const int64_t> cuts) {
  on_the_host(s, ranks, flat, [&](const Tensor& host) { ranks.all_gather(span_of<float>(host), cuts); });
}

}  // namespace kestrel
