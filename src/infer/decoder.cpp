#include "src/infer/decoder.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/elementwise.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"

namespace kestrel {
namespace {

constexpr int64_t kChunk = 256;  // tokens of a prompt taken at once

}  // namespace

Decoder::Decoder(Model& model, int64_t max_tokens) : model_(model), max_tokens_(max_tokens) {
  const auto allocate = [&](Arena& arena) {
    layers_.clear();
    for (const auto& sublayer : model_.sublayers_) {
      LayerState& l = layers_.emplace_back();
      if (const auto* kda = dynamic_cast<const KdaLayer*>(sublayer.get())) {
        l.state = arena.keep({1, kda->heads(), kda->head_dim(), kda->head_dim()}, DType::f32, "states");
        l.history = arena.keep({kda->conv_width() - 1, 3 * kda->heads() * kda->head_dim()}, DType::f32, "states");
      } else if (const auto* mla = dynamic_cast<const MlaLayer*>(sublayer.get())) {
        l.latent = arena.keep({max_tokens_, mla->latent_dim()}, DType::f32, "cache");
        l.k_shared = arena.keep({max_tokens_, mla->rope_dim()}, DType::f32, "cache");
      }
    }
  };
  Arena planner = Arena::planner(Device::cpu);
  allocate(planner);
  // The largest call: a full chunk at the end of the longest sequence.
  const std::vector<int32_t> ids(static_cast<size_t>(std::min(kChunk, max_tokens_)));
  length_ = max_tokens_ - static_cast<int64_t>(ids.size());
  const int64_t bytes = planned_bytes(Device::cpu, [&](Stream& s) { run(s, ids); });
  state_memory_ = std::make_unique<Arena>(Device::cpu, planner.peak());
  allocate(*state_memory_);
  arena_ = std::make_unique<Arena>(Device::cpu, bytes);
  logits_.resize(static_cast<size_t>(model_.config().vocab_size));
  reset();
}

void Decoder::reset() {
  Stream s(*arena_);
  for (LayerState& l : layers_) {
    if (l.state) fill_zero(s, l.state);
    if (l.history) fill_zero(s, l.history);
  }
  length_ = 0;
}

std::span<const float> Decoder::feed(std::span<const int32_t> tokens) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  if (n == 0) throw DataError("nothing to decode from: the prompt is empty. Give at least one token.");
  if (length_ + n > max_tokens_) {
    throw DataError(text("the sequence would grow to ", length_ + n, " tokens, the decoder was made for ", max_tokens_,
                         ". Generate fewer tokens or shorten the prompt."));
  }
  for (int32_t id : tokens) {
    if (id < 0 || id >= model_.config().vocab_size)
      throw DataError(
          text("token id ", id, " is outside the model's vocabulary [0, ", model_.config().vocab_size, ")"));
  }
  Stream s(*arena_);
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    run(s, tokens.subspan(static_cast<size_t>(i), static_cast<size_t>(count)));
    length_ += count;
  }
  if (!std::all_of(logits_.begin(), logits_.end(), [](float x) { return std::isfinite(x); }))
    throw DivergedError(text("the logits after token ", length_,
                             " are not finite: the weights are too large to compute with. Use an earlier checkpoint."));
  return logits_;
}

void Decoder::mix(const Pass& pass, Tensor out, Tensor x, size_t i) {
  Sublayer* sublayer = model_.sublayers_[i].get();
  const LayerState& l = layers_[i];
  if (auto* kda = dynamic_cast<KdaLayer*>(sublayer)) {
    kda->decode(pass, out, x, l.state, l.history);
  } else if (auto* mla = dynamic_cast<MlaLayer*>(sublayer)) {
    mla->decode(pass, out, x, length_, l.latent, l.k_shared);
  } else {
    sublayer->forward(pass, out, x);
  }
}

void Decoder::run(Stream& s, std::span<const int32_t> tokens) {
  const int64_t T = static_cast<int64_t>(tokens.size());
  Pass pass(s);
  pass.B = 1;
  pass.T = T;
  pass.keep = pass.observe = false;
  const int64_t mark = s.arena->keep_mark();
  {
    ScratchScope scope(s);
    const MicroBatch batch{Tensor::of(tokens.data(), {1, T}), {}, {}};
    const Tensor x = model_.forward(pass, batch, [&](size_t i, Tensor out, Tensor in) { mix(pass, out, in, i); });
    gemm(s, Tensor::of(logits_.data(), {1, model_.config().vocab_size}), x.slice(T - 1, 1), Trans::no, model_.head()->w,
         Trans::yes);
  }
  s.arena->release_keep(mark);
}

}  // namespace kestrel
