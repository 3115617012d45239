// Stable LatentMoE: full-width router and shared expert, routed experts on a latent.
//
//   logits = float(x) W_r^T;  (index, p) = route(logits, bias)
//   z = x W_down^T   (no latent: z = x)
//   u = sum over the chosen experts e of  GLU(z W1_e^T, z W3_e^T) p_e  W2_e^T
//   y = RMSNorm(u) W_up^T + Shared(x)     (norm only with latent_moe_use_norm; no latent: u + Shared(x))
// The probability enters before the down projection: in exact arithmetic the same as after it, and then the combine is
// a plain sum and dp = <dh', h> needs no saved expert output.
#pragma once

#include <memory>
#include <string>

#include "kernels/experts/experts.h"
#include "src/model/balancer.h"
#include "src/model/ffn_layer.h"

namespace kestrel {

class MoeLayer : public Sublayer {
 public:
  MoeLayer(const ModelConfig& config, ParameterStore& store, const std::string& prefix);
  void forward(const Pass& pass, Tensor y, Tensor x) override;
  void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) override;

  Balancer& balancer() { return balancer_; }

 private:
  void route(const Pass& pass, Tensor x);
  void dispatch(const Pass& pass, Tensor x);  // rows of z, sorted by expert
  void activate(const Pass& pass);
  void normalise(const Pass& pass);
  void backward_shared(const Pass& pass, Tensor dx, Tensor dy, Tensor x);
  void backward_experts(const Pass& pass, Tensor dz, Tensor dweight, Tensor du);

  int64_t D_, E_, l_, f_;
  bool latent_, norm_;
  float eps_;
  Glu glu_;
  Block *router_, *down_ = nullptr, *w13_, *w2_, *u_norm_ = nullptr, *up_ = nullptr;
  Balancer balancer_;
  std::unique_ptr<FfnLayer> shared_;

  struct Activations {
    Tensor logits;                // [N, E] F32
    Tensor load;                  // [E] I32, this micro-batch
    Tensor index, weight, score;  // [N, slots]
    DispatchPlan plan;
    Tensor z;            // [N, l]; x itself without a latent
    Tensor rows;         // [R, l] (pointwise)
    Tensor p;            // [R] F32 routing weight by row
    Tensor gate_up;      // [R, 2f]
    Tensor h;            // [R, f] (pointwise)
    Tensor u;            // [N, l]
    Tensor u_rstd, u_n;  // [N], [N, l] (u_n pointwise)
  } a_;
};

}  // namespace kestrel
