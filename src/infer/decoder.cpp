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

Decoder::Decoder(Model& model, int64_t max_tokens)
    : model_(model),
      device_(model.head()->w.device),
      dtype_(model.parameters().working_dtype()),
      max_tokens_(max_tokens),
      queue_(device_) {
  const int64_t chunk = std::min(kChunk, max_tokens_), V = model_.config().vocab_size;
  const auto allocate = [&](Arena& arena) {
    layers_.clear();
    for (const auto& sublayer : model_.sublayers_) {
      LayerState& l = layers_.emplace_back();
      if (const auto* kda = dynamic_cast<const KdaLayer*>(sublayer.get())) {
        l.state = arena.keep({1, kda->heads(), kda->head_dim(), kda->head_dim()}, DType::f32, "states");
        l.history = arena.keep({kda->conv_width() - 1, 3 * kda->heads() * kda->head_dim()}, dtype_, "states");
      } else if (const auto* mla = dynamic_cast<const MlaLayer*>(sublayer.get())) {
        l.latent = arena.keep({max_tokens_, mla->latent_dim()}, dtype_, "cache");
        l.k_shared = arena.keep({max_tokens_, mla->rope_dim()}, dtype_, "cache");
      }
    }
    tokens_ = arena.keep({chunk}, DType::i32, "batch");
    logits_ = arena.keep({1, V}, DType::f32, "batch");
  };
  Arena planner = Arena::planner(device_);
  allocate(planner);
  // The largest calls, at the end of the longest sequence: a full chunk, and one token, whose scratch grows with the
  // tokens before it.
  const auto bytes_of = [&](int64_t count) {
    length_ = max_tokens_ - count;
    return planned_bytes(device_, [&](Stream& s) { run(s, count); });
  };
  const int64_t bytes = std::max(bytes_of(chunk), bytes_of(1));
  state_memory_ = std::make_unique<Arena>(device_, planner.peak());
  allocate(*state_memory_);
  arena_ = std::make_unique<Arena>(device_, bytes);
  host_tokens_ = PinnedBuffer(device_, chunk * size_of(DType::i32));
  host_logits_ = PinnedBuffer(device_, V * size_of(DType::f32));
  reset();
}

Stream Decoder::stream() const {
  Stream s(*arena_);
  s.queue = queue_.get();
  return s;
}

void Decoder::reset() {
  Stream s = stream();
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
  Stream s = stream();
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    const Tensor host = host_tokens_.tensor({1, count}, DType::i32);
    std::copy_n(tokens.begin() + i, count, host.i32());
    upload(s, input(count), host);
    run(s, count);
    wait(s);  // before host_tokens_ is written again
    length_ += count;
  }
  const Tensor host = host_logits_.tensor({1, model_.config().vocab_size}, DType::f32);
  download(s, host, logits_);
  wait(s);
  const std::span<const float> logits(host.f32(), static_cast<size_t>(host.numel()));
  if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }))
    throw DivergedError(text("the logits after token ", length_,
                             " are not finite: the weights are too large to compute with. Use an earlier checkpoint."));
  return logits;
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

// The last `count` tokens of the sequence are in tokens_.
void Decoder::run(Stream& s, int64_t count) {
  Pass pass(s);
  pass.B = 1;
  pass.T = count;
  pass.dtype = dtype_;
  pass.keep = pass.observe = false;
  const int64_t mark = s.arena->keep_mark();
  {
    ScratchScope scope(s);
    const MicroBatch batch{input(count), {}, {}};
    const Tensor x = model_.forward(pass, batch, [&](size_t i, Tensor out, Tensor in) { mix(pass, out, in, i); });
    gemm(s, logits_, x.slice(count - 1, 1), Trans::no, model_.head()->w, Trans::yes);
  }
  s.arena->release_keep(mark);
}

}  // namespace kestrel
