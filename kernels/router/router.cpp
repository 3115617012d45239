#include "kernels/router/router.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/router/router_cpu.h"
#include "kernels/router/router_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "the router has no ", name_of(s.device()), " back end in this build");
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

void check_routing(const Routing& r) {
  KESTREL_CHECK(r.experts >= 1 && r.k >= 1 && r.k <= r.experts, "k = ", r.k, " of ", r.experts, " experts");
  KESTREL_CHECK(r.threshold ? r.slots >= 1 && r.slots <= r.experts : r.slots == r.k, "slots = ", r.slots,
                r.threshold ? ", a cap is 1 .. experts" : ", top-k routing has k slots", ", k = ", r.k);
}

}  // namespace

void route_forward(Stream& s, const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid) {
  const OpRange range(s, "route_forward");
  check_routing(r);
  const int64_t N = logits.rows();
  check_matrix("logits", logits, DType::f32, N, r.experts);
  check_matrix("index", index, DType::i32, N, r.slots);
  check_matrix("weight", weight, DType::f32, N, r.slots);
  check_matrix("score", score, DType::f32, N, r.slots);
  check_vector("bias", bias, DType::f32, r.experts);
  check_vector("load", load, DType::i32, r.experts);
  if (!r.threshold) check_vector("cutoff", cutoff, DType::f32, N);
  if (valid) check_vector("valid", valid, DType::u8, N);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      if (!s.planning()) cuda::route_forward(s, r, index, weight, score, cutoff, load, logits, bias, valid);
      return;
    }
  }
  ScratchScope scope(s);
  const int64_t pieces = (N + cpu::kRouteGrain - 1) / cpu::kRouteGrain, capacity = cpu::list_capacity(r);
  Tensor list = s.temp({pieces, 2 * capacity}, DType::i32);
  Tensor list_scores = s.temp({pieces, capacity}, DType::f32);
  if (s.planning()) return;
  require_cpu(s);
  cpu::route_forward(r, index, weight, score, cutoff, load, logits, bias, valid, list, list_scores);
}

void route_backward(Stream& s, const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score) {
  const OpRange range(s, "route_backward");
  check_routing(r);
  const int64_t N = dlogits.rows();
  check_matrix("dlogits", dlogits, DType::f32, N, r.experts);
  check_matrix("dweight", dweight, DType::f32, N, r.slots);
  check_matrix("index", index, DType::i32, N, r.slots);
  check_matrix("score", score, DType::f32, N, r.slots);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::route_backward(s, r, dlogits, dweight, index, score);
  }
  require_cpu(s);
  cpu::route_backward(r, dlogits, dweight, index, score);
}

void aux_loss(Stream& s, float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits,
              Tensor load_of_batch, int64_t k, Tensor valid) {
  const OpRange range(s, "aux_loss");
  const int64_t N = logits.rows(), E = logits.cols();
  KESTREL_CHECK(k >= 1 && k <= E, "k = ", k, " of ", E, " experts");
  check_matrix("logits", logits, DType::f32, N, E);
  check_matrix("dlogits", dlogits, DType::f32, N, E);
  check_vector("load_of_batch", load_of_batch, DType::i32, E);
  check_vector("loss", loss, DType::f32, 1);
  if (valid) check_vector("valid", valid, DType::u8, N);
  ScratchScope scope(s);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      const Tensor partial = s.temp({(N + cuda::kAuxRows - 1) / cuda::kAuxRows}), counted = s.temp({1}, DType::i32);
      if (s.planning()) return;
      return cuda::aux_loss(s, coefficient, scale, loss, dlogits, logits, load_of_batch, k, valid, partial, counted);
    }
  }
  Tensor partial = s.temp({(N + cpu::kRouteGrain - 1) / cpu::kRouteGrain}, DType::f32);
  if (s.planning()) return;
  require_cpu(s);
  cpu::aux_loss(coefficient, scale, loss, dlogits, logits, load_of_batch, k, valid, partial);
}

}  // namespace kestrel
