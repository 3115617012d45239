// One batch through a model, outside training: what `kestrel parity` and the golden tests run.
#pragma once

#include <memory>
#include <vector>

#include "src/checkpoint/safetensors.h"
#include "src/model/model.h"

namespace kestrel {

class Evaluation {
 public:
  struct Options {
    Device device = Device::cpu;
    DType dtype = DType::f32;
    Recompute recompute = Recompute::none;
  };
  // Parameters are allocated with gradients; load or initialise them before run().
  Evaluation(const ModelConfig& config, const Options& options);

  Model& model() { return model_; }

  struct Result {
    double loss = 0;  // mean nats over targets != -100
    int64_t targets = 0;
    Tensor logits;  // [B*T, vocab] F32, valid until the next run
  };
  // input holds `tokens`, `targets` [B,T] and maybe `segment` [B,T] (I32 or I64).  With gradients they lie in the
  // parameters afterwards: of the mean loss, one micro-batch.  DataError for ids outside the vocabulary or wrong
  // shapes.
  Result run(const SafetensorsFile& input, bool gradients);

 private:
  Options options_;
  Model model_;
  std::unique_ptr<Arena> state_, arena_;
  std::vector<int32_t> ids_[3];
  std::vector<char> logits_;
  std::vector<float> losses_;
};

}  // namespace kestrel
