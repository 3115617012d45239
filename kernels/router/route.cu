// route_forward: the kernel that fits the shape.
#include "kernels/router/route.cuh"
#include "kernels/router/router_cuda.h"

namespace kestrel::cuda {

void route_forward(Stream& s, const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid) {
  RouteArguments a;
  a.index = index.i32(), a.weight = weight.f32(), a.score = score.f32();
  a.cutoff = r.threshold ? nullptr : cutoff.f32();
  a.load = load.i32(), a.logits = logits.f32(), a.bias = bias.f32();
  a.valid = valid ? valid.as<uint8_t>() : nullptr;
  a.index_ld = index.ld, a.weight_ld = weight.ld, a.score_ld = score.ld, a.logits_ld = logits.ld, a.N = logits.rows();
  a.E = static_cast<int>(r.experts), a.k = static_cast<int>(r.k), a.slots = static_cast<int>(r.slots);
  a.threshold = r.threshold, a.renormalize = r.renormalize, a.scaling = r.scaling;
  if (a.N == 0 || route_by_network(s, a) || route_by_candidates(s, a)) return;
  route_by_rounds(s, a);
}

}  // namespace kestrel::cuda
