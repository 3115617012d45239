#include "src/parallel/expert_exchange.h"

#include <algorithm>
#include <numeric>

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/core/transfer.h"

namespace kestrel {

ExpertExchange::Route ExpertExchange::route(Stream& s, const DispatchPlan& plan) const {
  Route r;
  if (s.planning()) {
    // Every token of the group may choose as many experts here as it has slots, or as there are.
    r.received.assign(static_cast<size_t>(ranks()), plan.tokens() * std::min(plan.slots(), count()));
    r.rows = ranks() * r.received[0];
    return r;
  }
  KESTREL_CHECK(share_.group != nullptr, "experts on ", ranks(), " ranks, and no way to reach the others");
  std::vector<char> memory;
  const int64_t* offset = on_host(s, plan.offsets, memory).as<int64_t>();
  std::vector<int64_t> mine;
  for (int64_t e = 0; e < experts_; ++e) mine.push_back(offset[e + 1] - offset[e]);
  const std::vector<int64_t> all = share_.group->gather(mine);  // [ranks, E]
  for (int64_t q = 0; q < ranks(); ++q) {
    const int64_t *to_q = mine.data() + q * count(), *from_q = all.data() + q * experts_ + first();
    r.sent.push_back(std::accumulate(to_q, to_q + count(), int64_t{0}));
    r.received.push_back(std::accumulate(from_q, from_q + count(), int64_t{0}));
    r.counts.insert(r.counts.end(), from_q, from_q + count());
    r.rows += r.received.back();
  }
  return r;
}

void ExpertExchange::fill_offsets(Stream& s, const Route& r) const {
  if (s.planning()) return;
  std::vector<int64_t> host;
  for (int64_t q = 0; q < ranks(); ++q) {
    host.push_back(0);
    for (int64_t e = 0; e < count(); ++e) host.push_back(host.back() + r.counts[static_cast<size_t>(q * count() + e)]);
  }
  upload(s, r.offsets, Tensor::of(host.data(), {ranks(), count() + 1}));
}

void ExpertExchange::exchange(Stream& s, const std::vector<int64_t>& to, const std::vector<int64_t>& from, Tensor out,
                              Tensor in) const {
  if (s.planning()) return;
  KESTREL_CHECK(in.contiguous() && out.contiguous() && in.dtype == out.dtype, in.describe(), " sent, ", out.describe(),
                " received");
  const int64_t row_bytes = (in.rank == 1 ? 1 : in.cols()) * size_of(in.dtype);
  std::vector<char> sent, received;
  const Tensor send = on_host(s, in, sent);
  Tensor receive = out;
  if (out.device != Device::cpu) {
    received.resize(static_cast<size_t>(out.bytes()));
    receive.data = received.data();
    receive.device = Device::cpu;
  }
  share_.group->exchange_rows(send.data, to, receive.data, from, row_bytes);
  if (out.device == Device::cpu) return;
  upload(s, out, receive);
  wait(s);  // the staging memory goes
}

void ExpertExchange::to_experts(Stream& s, const Route& r, Tensor out, Tensor rows) const {
  const OpRange range(s, "to_experts");
  exchange(s, r.sent, r.received, out, rows);
}

void ExpertExchange::from_experts(Stream& s, const Route& r, Tensor rows, Tensor in) const {
  const OpRange range(s, "from_experts");
  exchange(s, r.received, r.sent, rows, in);
}

}  // namespace kestrel
