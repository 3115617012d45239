// The linear attention sublayer: projections, short convolutions, KDA, gated norm, output projection.
//
//   [q|k|v|gate|f|b] = x W_in^T        one product for everything that reads x
//   q, k, v = SiLU(conv(q, k, v));  decay logits = f W_fb^T;  gate = full rank, or gate_a W_gb^T
//   y = (RMSNorm(KDA(q, k, v, decay, b)) * sigmoid(gate)) W_o^T
// H heads of K = V channels.  Parameter names: k3_spec section 3.
#pragma once

#include <string>

#include "kernels/kda/kda.h"
#include "src/model/parameters.h"
#include "src/model/sublayer.h"

namespace kestrel {

class KdaLayer : public Sublayer {
 public:
  KdaLayer(const ModelConfig& config, ParameterStore& store, const std::string& prefix);
  void forward(const Pass& pass, Tensor y, Tensor x) override;
  void backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) override;

  // Decoding: T new tokens of each row after a prefix.  state [B,H,K,K] F32 and history [B*(W-1), 3HK] are read and
  // replaced.
  void decode(const Pass& pass, Tensor y, Tensor x, Tensor state, Tensor history);
  int64_t heads() const { return H_; }
  int64_t head_dim() const { return K_; }
  int64_t conv_width() const { return W_; }

 private:
  // Column blocks of the input projection.
  Tensor qkv(Tensor proj) const { return proj.columns(0, 3 * H_ * K_); }
  Tensor gate_in(Tensor proj) const { return proj.columns(3 * H_ * K_, full_rank_gate_ ? H_ * K_ : K_); }
  Tensor decay_in(Tensor proj) const { return proj.columns(proj.cols() - H_ - K_, K_); }
  Tensor beta(Tensor proj) const { return proj.columns(proj.cols() - H_, H_); }

  void project(const Pass& pass, Tensor x);
  void convolve(const Pass& pass, Tensor history = {});
  void normalise(const Pass& pass);
  Tensor gate() const { return full_rank_gate_ ? gate_in(a_.proj) : a_.gate; }
  KdaDims dims(const Pass& pass) const { return {pass.B, pass.T, H_, K_, K_}; }
  KdaInputs kda_inputs(const Pass& pass) const;

  int64_t D_, H_, K_, W_;
  bool full_rank_gate_;
  std::optional<float> lower_bound_;
  float eps_;
  Block *in_, *conv_, *A_log_, *dt_bias_, *f_b_, *g_b_ = nullptr, *o_norm_, *o_;

  struct Activations {
    Tensor proj;   // [N, 3HK + gate + K + H]
    Tensor qkv;    // [N, 3HK] after convolution and SiLU (pointwise)
    Tensor decay;  // [N, HK] decay logits without dt_bias
    Tensor gate;   // [N, HK] low-rank gate only
    Tensor o;      // [N, HK]
    Tensor state;  // what KDA saves
    Tensor n;      // [N, HK] after the gated norm (pointwise)
    Tensor rstd;   // [N, H]
  } a_;
};

}  // namespace kestrel
