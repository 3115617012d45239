// Token-by-token decoding: a new token costs one token's work, whatever came before.
//
// Per KDA layer a state [H,K,K] and the last W-1 convolution inputs; per MLA layer the normalised latents and the
// shared keys of all tokens so far (c + rope numbers a token). Routing uses the frozen bias.  One sequence at a time,
// on the device and in the dtype that the model's weights were allocated for; KDA states are F32.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "src/model/model.h"

namespace kestrel {

class Decoder {
 public:
  // `model` must be allocated, its weights loaded; max_tokens bounds the sequence (prompt and generated).
  Decoder(Model& model, int64_t max_tokens);

  // Appends tokens to the sequence; returns the logits [vocab] after the last of them, valid until the next call.
  // DataError beyond max_tokens or for an id outside the vocabulary.
  std::span<const float> feed(std::span<const int32_t> tokens);
  void reset();
  int64_t length() const { return length_; }
  int64_t max_tokens() const { return max_tokens_; }

 private:
  void run(Stream& s, int64_t count);
  Stream stream() const;
  Tensor input(int64_t count) const { return tokens_.slice(0, count).view({1, count}); }
  void mix(const Pass& pass, Tensor out, Tensor x, size_t sublayer);

  struct LayerState {
    Tensor state, history;    // KDA
    Tensor latent, k_shared;  // MLA
  };
  Model& model_;
  Device device_;
  DType dtype_;
  int64_t max_tokens_, length_ = 0;
  DeviceQueue queue_;
  std::unique_ptr<Arena> state_memory_, arena_;
  std::vector<LayerState> layers_;  // per sublayer; feed-forward entries stay empty
  Tensor tokens_, logits_;          // of a call, on the device: I32 [chunk], F32 [1, vocab]
  PinnedBuffer host_tokens_, host_logits_;
};

}  // namespace kestrel
