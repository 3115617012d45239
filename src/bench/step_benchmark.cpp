#include "src/bench/step_benchmark.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "src/bench/timing.h"
#include "src/model/model.h"
#include "src/model/random.h"
#include "src/train/device_choice.h"
#include "src/train/optimizer.h"
#include "src/train/plan.h"

namespace kestrel {
namespace {

// Dense bf16 rate of the datasheet, for the fraction that is printed beside the rate.
double datasheet_flops(const std::string& device, DType dtype) {
  if (dtype != DType::bf16) return 0;
  if (device.find("H100") != std::string::npos || device.find("H200") != std::string::npos) return 989e12;
  if (device.find("A100") != std::string::npos) return 312e12;
  return 0;
}

}  // namespace

StepBenchmark benchmark_step(const RunConfig& c, const StepBenchmarkOptions& o) {
  const Device device = choose_device(c.train);
  if (device == Device::cuda) use_device(0);
  StepBenchmark r;
  const Model::PassOptions pass = pass_options(c.train, device);
  r.device = device == Device::cuda ? device_properties(0).name : "cpu";
  r.precision = pass.dtype == DType::bf16 ? "bf16" : "fp32";
  r.micro_batches = c.train.global_batch_size / c.train.micro_batch_size;
  r.tokens_per_step = c.tokens_per_step();
  r.flops_per_token = flops_per_token(c.model, c.data.sequence_length);
  r.peak_flops = datasheet_flops(r.device, pass.dtype);

  const DeviceQueue queue(device);
  Model model(c.model);
  const bool sums = sums_gradients(c.train, device);
  model.parameters().allocate(device, pass.dtype, true, sums);
  model.parameters().initialize(static_cast<uint64_t>(c.train.seed));
  Optimizer optimizer(model.parameters(), c.optimizer, device);

  const int64_t B = c.train.micro_batch_size, T = c.data.sequence_length;
  MicroBatch batch;
  Tensor losses;
  const auto allocate = [&](Stream& s) {
    model.allocate_state(*s.arena, optimizer.clips_heads());
    batch = {s.arena->keep({B, T}, DType::i32, "batch"), s.arena->keep({B, T}, DType::i32, "batch"), {}};
    losses = s.arena->keep({B * T}, DType::f32, "batch");
  };
  Arena state(device, planned_bytes(device, allocate));
  Stream state_stream(state);
  allocate(state_stream);

  const float scale = static_cast<float>(1.0 / static_cast<double>(r.tokens_per_step));
  Arena arena(device, planned_bytes(device, [&](Stream& s) { plan_step(s, model, optimizer, batch, losses, pass); }));
  Stream s(arena);
  s.queue = queue.get();
  std::vector<int32_t> ids(static_cast<size_t>(B * T));
  const CounterRandom random(1, "benchmark tokens");
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(random.uniform(i) * static_cast<double>(c.model.vocab_size));
  upload(s, batch.tokens, Tensor::of(ids.data(), {B, T}));
  std::rotate(ids.begin(), ids.begin() + 1, ids.end());
  upload(s, batch.targets, Tensor::of(ids.data(), {B, T}));

  model.begin_step(s);
  model.parameters().zero_gradients(s);
  const auto micro_batch = [&] {
    model.train(s, batch, losses, scale, pass);
    model.parameters().fold_gradients(s);
  };
  int64_t updates = 0;
  const auto update = [&] {
    optimizer.measure(s, model);
    wait(s);
    optimizer.step(s, ++updates, 1e-4, optimizer.clip_scale(optimizer.gradient_norm()));
    model.apply_balance(s);
    model.begin_step(s);
    model.parameters().zero_gradients(s);
  };
  for (int64_t i = 0; i < o.warmup; ++i) micro_batch();
  const Timing micro_time = time_samples(s, o.repeats, 1, micro_batch);
  update();
  const Timing update_time = time_samples(s, o.updates, 1, update);
  if (o.profile) {
    Profiler profiler(device);
    s.profiler = &profiler;
    for (int64_t i = 0; i < r.micro_batches; ++i) micro_batch();
    update();
    profiler.collect(s);
    r.profile = profiler.rows();
    s.profiler = nullptr;
  }
  r.micro_batch_ms = 1e3 * micro_time.median;
  r.micro_batch_spread = micro_time.spread;
  r.update_ms = 1e3 * update_time.median;
  r.arena_bytes = arena.capacity();
  r.memory_bytes = arena.capacity() + state.capacity() +
                   Optimizer::state_bytes(model.parameters(), c.optimizer, optimizer.shares()) +
                   model.parameters().elements() * (8 + (sums ? 8 : 0) + (pass.dtype == DType::bf16 ? 2 : 0));
  return r;
}

std::string benchmark_text(const StepBenchmark& b) {
  char line[256];
  std::string out = text("device       ", b.device, ", ", b.precision, "\n");
  std::snprintf(line, sizeof line, "micro-batch  %10.2f ms forward and backward (spread %.1f %%), x %lld\n",
                b.micro_batch_ms, 100 * b.micro_batch_spread, static_cast<long long>(b.micro_batches));
  out += line;
  std::snprintf(line, sizeof line, "update       %10.2f ms norm, clip, optimizer, balance\n", b.update_ms);
  out += line;
  std::snprintf(line, sizeof line, "step         %10.2f ms of %lld tokens: %.0f tokens/s, %.2f TFLOP/s", b.step_ms(),
                static_cast<long long>(b.tokens_per_step), b.tokens_per_s(),
                b.tokens_per_s() * b.flops_per_token / 1e12);
  out += line;
  if (b.peak_flops > 0) {
    std::snprintf(line, sizeof line, " (%.1f %% of %.0f)", 100 * b.tokens_per_s() * b.flops_per_token / b.peak_flops,
                  b.peak_flops / 1e12);
    out += line;
  }
  std::snprintf(line, sizeof line, "\nmemory       %10.3f GiB, of it %.3f GiB activations and scratch\n",
                static_cast<double>(b.memory_bytes) / (1 << 30), static_cast<double>(b.arena_bytes) / (1 << 30));
  out += line;
  if (!b.profile.empty()) out += "\nOne step by operation:\n" + profile_text(b.profile, 1);
  return out;
}

std::string benchmark_json(const StepBenchmark& b) {
  nlohmann::ordered_json profile = nlohmann::ordered_json::array();
  for (const Profiler::Row& r : b.profile) {
    profile.push_back({{"phase", r.phase}, {"operation", r.operation}, {"calls", r.calls}, {"ms", r.ms}});
  }
  return nlohmann::ordered_json{{"device", b.device},
                                {"precision", b.precision},
                                {"micro_batches", b.micro_batches},
                                {"tokens_per_step", b.tokens_per_step},
                                {"micro_batch_ms", b.micro_batch_ms},
                                {"micro_batch_spread", b.micro_batch_spread},
                                {"update_ms", b.update_ms},
                                {"step_ms", b.step_ms()},
                                {"tokens_per_s", b.tokens_per_s()},
                                {"flops_per_token", b.flops_per_token},
                                {"memory_bytes", b.memory_bytes},
                                {"arena_bytes", b.arena_bytes},
                                {"profile", profile}}
      .dump(2);
}

}  // namespace kestrel
