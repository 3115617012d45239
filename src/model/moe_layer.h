// Stable LatentMoE: full-width router and shared expert, routed experts on a latent.
//
//   logits = float(x) W_r^T;  (index, p) = route(logits, bias)
//   z = x W_down^T   (no latent: z = x)
//   u = sum over the chosen experts e of  GLU(z W1_e^T, z W3_e^T) p_e  W2_e^T
//   y = RMSNorm(u) W_up^T + Shared(x)     (norm only with latent_moe_use_norm; no latent: u + Shared(x))
// The probability enters before the down projection: in exact arithmetic the same as after it, and then the combine is
// a plain sum and dp = <dh', h> needs no saved expert output.
//
// With the experts shared out over ranks (parallel.expert) the rows z and p travel to them, their sums' terms back, in
// backward du there and dz, dp back; router, latent projections and shared expert work on the rank's own tokens.
#pragma once

#include <memory>
#include <string>

#include "kernels/experts/experts.h"
#include "src/model/balancer.h"
#include "src/model/ffn_layer.h"
#include "src/parallel/expert_exchange.h"

namespace kestrel {

class MoeLayer : public Sublayer {
 public:
  MoeLayer(const ModelConfig& config, ParameterStore& store, const std::string& prefix, const ExpertShare& share);
  void forward(const Pass& pass, Tensor y, Tensor x) override;
  void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) override;

  Balancer& balancer() { return balancer_; }

 private:
  void route(const Pass& pass, Tensor x);
  void dispatch(const Pass& pass, Tensor x);         // rows of z, sorted by expert
  void send_rows(Stream& s, Tensor rows, Tensor x);  // rows[r] of the experts here = x of the row's token
  void send_slots(Stream& s, Tensor rows, Tensor value);
  void collect_rows(Stream& s, Tensor y, Tensor rows);  // y of a token = the sum of its slots' rows
  void collect_slots(Stream& s, Tensor value, Tensor rows);
  int64_t rows_here() const { return exchange_.alone() ? a_.plan.max_rows() : a_.route.rows; }
  // fn(first row, rows, offsets) for the rows of each rank that sent some here.
  template <class F>
  void for_each_source(F&& fn) const;
  void expert_products(Stream& s, Tensor y, Tensor x, const Block& w, int64_t out);
  void expert_input_gradients(Stream& s, Tensor dx, Tensor dy, const Block& w, int64_t out);
  void expert_weight_gradients(Stream& s, const Block& w, int64_t out, Tensor dy, Tensor x);
  void activate(const Pass& pass);
  void normalise(const Pass& pass);
  void backward_shared(const Pass& pass, Tensor dx, Tensor dy, Tensor x);
  void backward_experts(const Pass& pass, Tensor dz, Tensor dweight, Tensor du);

  ParameterStore& store_;
  ExpertExchange exchange_;
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
    DispatchPlan plan;            // of this rank's tokens over all experts
    ExpertExchange::Route route;  // with experts on several ranks
    Tensor z;                     // [N, l]; x itself without a latent
    Tensor rows;                  // [R, l] (pointwise); R: rows of the experts here
    Tensor p;                     // [R] F32 routing weight by row
    Tensor gate_up;               // [R, 2f]
    Tensor h;                     // [R, f] (pointwise)
    Tensor u;                     // [N, l]
    Tensor u_rstd, u_n;           // [N], [N, l] (u_n pointwise)
  } a_;
};

}  // namespace kestrel
