#include "src/model/evaluation.h"

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "kernels/loss/loss.h"

namespace kestrel {
namespace {

// An id tensor [B,T] of the file as I32.
std::vector<int32_t> ids(const SafetensorsFile& file, const std::string& name, int64_t B, int64_t T) {
  const Tensor t = file.tensor(name);
  if (t.rank != 2 || t.dim(0) != B || t.dim(1) != T || (t.dtype != DType::i32 && t.dtype != DType::i64)) {
    throw DataError(text(file.path(), ": \"", name, "\" is ", t.describe(), ", expected I32 or I64 [", B, ",", T, "]"));
  }
  std::vector<int32_t> out(static_cast<size_t>(t.numel()));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = t.dtype == DType::i32 ? t.i32()[i] : static_cast<int32_t>(t.as<int64_t>()[i]);
  }
  return out;
}

void check_range(const SafetensorsFile& file, const char* name, const std::vector<int32_t>& v, int64_t vocab,
                 bool ignore_allowed) {
  for (size_t i = 0; i < v.size(); ++i) {
    if ((v[i] >= 0 && v[i] < vocab) || (ignore_allowed && v[i] == kIgnoreTarget)) continue;
    throw DataError(text(file.path(), ": \"", name, "\" holds id ", v[i], " at position ", i,
                         "; the model's vocabulary is [0, ", vocab,
                         ignore_allowed ? ") (or -100 for no target)" : ")"));
  }
}

}  // namespace

Evaluation::Evaluation(const ModelConfig& config, const Options& options) : options_(options), model_(config) {
  KESTREL_CHECK(options.device == Device::cuda || options.dtype == DType::f32, "the CPU back end computes in fp32");
  model_.parameters().allocate(options.device, options.dtype, /*gradients=*/true);
  const auto allocate = [&](Stream& s) { model_.allocate_state(*s.arena, false); };
  state_ = std::make_unique<Arena>(options.device, planned_bytes(options.device, allocate));
  model_.allocate_state(*state_, false);
}

Evaluation::Result Evaluation::run(const SafetensorsFile& input, bool gradients) {
  const Tensor shape = input.tensor("tokens");
  if (shape.rank != 2 || shape.numel() == 0)
    throw DataError(text(input.path(), ": \"tokens\" is ", shape.describe(), ", expected [B,T]"));
  const int64_t B = shape.dim(0), T = shape.dim(1), V = model_.config().vocab_size;
  const bool segmented = input.has("segment");
  ids_[0] = ids(input, "tokens", B, T);
  ids_[1] = ids(input, "targets", B, T);
  if (segmented) ids_[2] = ids(input, "segment", B, T);
  check_range(input, "tokens", ids_[0], V, false);
  check_range(input, "targets", ids_[1], V, true);

  if (segmented && !model_.config().document_mask) model_.set_document_mask(true);  // a file with documents means them
  Result r;
  for (int32_t t : ids_[1]) r.targets += t != kIgnoreTarget;
  if (r.targets == 0) throw DataError(text(input.path(), ": every target is -100; there is no loss to compute"));
  const float scale = static_cast<float>(1.0 / static_cast<double>(r.targets));
  Model::PassOptions options;
  options.dtype = options_.dtype;
  options.recompute = options_.recompute;
  Tensor losses, logits;
  const auto passes = [&](Stream& s) {
    MicroBatch batch;
    Tensor* inputs[3] = {&batch.tokens, &batch.targets, &batch.segment};
    for (int i = 0; i < (segmented ? 3 : 2); ++i) {
      *inputs[i] = s.arena->keep({B, T}, DType::i32, "batch");
      upload(s, *inputs[i], Tensor::of(ids_[i].data(), {B, T}));
    }
    losses = s.arena->keep({B * T}, DType::f32, "batch");
    logits = s.arena->keep({B * T, V}, DType::f32, "batch");
    model_.begin_step(s);
    model_.logits(s, batch, logits, options);
    if (gradients) {
      model_.train(s, batch, losses, scale, options);
    } else {
      model_.evaluate(s, batch, losses, options);
    }
  };
  arena_ = std::make_unique<Arena>(options_.device, planned_bytes(options_.device, passes));
  Stream s(*arena_);
  model_.parameters().zero_gradients(s);
  passes(s);
  losses_.assign(static_cast<size_t>(B * T), 0.f);
  download(s, Tensor::of(losses_.data(), {B * T}), losses);
  wait(s);
  r.logits = on_host(s, logits, logits_);
  double sum = 0;
  for (float x : losses_) sum += static_cast<double>(x);
  r.loss = sum / static_cast<double>(r.targets);
  return r;
}

}  // namespace kestrel
