#include "src/model/ffn_layer.h"

#include "kernels/gemm/gemm.h"
#include "src/model/init.h"

namespace kestrel {

Glu glu_of(const ModelConfig& c) {
  Glu g;
  g.kind = c.hidden_act == ModelConfig::HiddenAct::situ ? Glu::Kind::situ : Glu::Kind::silu;
  g.beta = static_cast<float>(c.activation_situ_beta);
  g.linear_beta = static_cast<float>(c.activation_situ_linear_beta);
  return g;
}

FfnLayer::FfnLayer(const ModelConfig& c, ParameterStore& store, const std::string& pre, int64_t width)
    : D_(c.hidden_size), F_(width), glu_(glu_of(c)) {
  gate_up_ = store.declare(D_, {matrix_member(pre + ".gate_proj.weight", F_, D_, weight_init(c), Rule::muon),
                                matrix_member(pre + ".up_proj.weight", F_, D_, weight_init(c), Rule::muon)});
  down_ = store.declare(F_, {matrix_member(pre + ".down_proj.weight", D_, F_, output_init(c), Rule::muon)});
}

void FfnLayer::activate(const Pass& pass) {
  a_.h = pass.save_pointwise({pass.N(), F_}, pass.dtype, "ffn");
  glu_forward(pass.s, glu_, a_.h, a_.gate_up.columns(0, F_), a_.gate_up.columns(F_, F_));
}

void FfnLayer::forward(const Pass& pass, Tensor y, Tensor x) {
  a_.gate_up = pass.save({pass.N(), 2 * F_}, pass.dtype, "ffn");
  linear_forward(pass.s, a_.gate_up, x, gate_up_->w);
  activate(pass);
  linear_forward(pass.s, y, a_.h, down_->w);
}

void FfnLayer::backward(const Pass& pass, Tensor dx, Tensor dy, Tensor x) {
  ScratchScope scope(pass.s);
  const int64_t N = pass.N();
  if (pass.recompute == Recompute::block) {
    forward(pass.recomputing(), pass.s.temp({N, D_}, pass.dtype), x);
  } else if (pass.recompute == Recompute::pointwise) {
    activate(pass.recomputing());
  }
  Tensor dh = pass.s.temp({N, F_}, pass.dtype);
  const Tensor dgate_up = a_.gate_up;  // in place: nobody reads the forward's values after the unit's backward
  linear_backward(pass.s, dh, down_->g, dy, a_.h, down_->w);
  glu_backward(pass.s, glu_, dgate_up.columns(0, F_), dgate_up.columns(F_, F_), {}, dh, a_.gate_up.columns(0, F_),
               a_.gate_up.columns(F_, F_));
  linear_backward(pass.s, dx, gate_up_->g, dgate_up, x, gate_up_->w);
}

}  // namespace kestrel
