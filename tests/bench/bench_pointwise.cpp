// Memory throughput of the operations between the matrix products on the GPU, in BF16 at the size of a training step
// (32768 tokens, width 2048): time, the bytes an operation must move, and their rate beside that of a device copy.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "kernels/attn_res/attn_res.h"
#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/transfer.h"
#include "kernels/embedding/embedding.h"
#include "kernels/glu/glu.h"
#include "kernels/norm/norm.h"
#include "kernels/short_conv/short_conv.h"

using namespace kestrel;

namespace {

constexpr int64_t kN = 32768, kD = 2048, kHeads = 16, kHead = 128, kConv = 3 * kHeads * kHead, kF = 1024, kV = 32768;
constexpr int64_t kExpertRows = 8 * kN;

class Bench {
 public:
  Bench() : arena_((use_device(0), Device::cuda), int64_t{48} << 30), queue_(Device::cuda), s_(arena_) {
    s_.queue = queue_.get();
    std::mt19937 rng(1);
    std::normal_distribution<float> d;
    noise_.resize(1 << 20);
    for (float& x : noise_) x = d(rng);
  }
  Stream& stream() { return s_; }
  Tensor tensor(int64_t rows, int64_t cols, DType t = DType::bf16) {
    const Tensor x = arena_.keep({rows, cols}, t, "benchmark");
    if (t == DType::i32) return x;
    // The same numbers over and over, cast on the device.
    const int64_t chunk = static_cast<int64_t>(noise_.size());
    const Tensor flat = x.view({1, rows * cols});
    const int64_t mark = arena_.temp_mark();
    const Tensor from = s_.temp({1, chunk});
    upload(s_, from, Tensor::of(noise_.data(), {1, chunk}));
    for (int64_t i = 0; i < flat.cols(); i += chunk) {
      const int64_t n = std::min(chunk, flat.cols() - i);
      copy_cast(s_, flat.columns(i, n), from.columns(0, n));
    }
    wait(s_);
    arena_.release_temp(mark);
    return x;
  }
  Tensor vector(int64_t n) { return tensor(1, n, DType::f32).view({n}); }
  // Best of five runs of twenty calls each.
  void row(const char* name, double bytes, const std::function<void()>& op) {
    using Clock = std::chrono::steady_clock;
    constexpr int kCalls = 20;
    double best = 1e9;
    op();
    wait(s_);
    for (int run = 0; run < 5; ++run) {
      const auto start = Clock::now();
      for (int i = 0; i < kCalls; ++i) op();
      wait(s_);
      best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / kCalls);
    }
    const double rate = bytes / best * 1e-12;
    if (copy_rate_ == 0) copy_rate_ = rate;
    std::printf("| %-44s | %8.3f | %8.1f | %5.2f | %5.1f |\n", name, best * 1e3, bytes * 1e-6, rate,
                100 * rate / copy_rate_);
  }

 private:
  Arena arena_;
  DeviceQueue queue_;
  Stream s_;
  std::vector<float> noise_;
  double copy_rate_ = 0;
};

double bytes(std::initializer_list<Tensor> tensors) {
  double n = 0;
  for (const Tensor& t : tensors) n += static_cast<double>(t.bytes());
  return n;
}

void copies(Bench& b) {
  const Tensor x = b.tensor(kN, kConv), y = b.tensor(kN, kConv), f = b.tensor(kN, kD, DType::f32);
  const Tensor g = b.tensor(kN, kD, DType::f32);
  b.row("copy BF16", bytes({x, y}), [&] { copy_cast(b.stream(), y, x); });
  const Tensor half = y.view({kN * kConv / kD, kD}).slice(0, kN);
  b.row("cast F32 to BF16", bytes({f, half}), [&] { copy_cast(b.stream(), half, f); });
  b.row("add_into F32", 3 * bytes({f}), [&] { add_into(b.stream(), g, f, 0.5f); });
}

void norms(Bench& b) {
  const Tensor x = b.tensor(kN, kD), y = b.tensor(kN, kD), dx = b.tensor(kN, kD), gate = b.tensor(kN, kD);
  const Tensor dgate = b.tensor(kN, kD), w = b.vector(kD), dw = b.vector(kD), r = b.vector(kN),
               rh = b.vector(kN * kHeads);
  const Tensor wh = b.vector(kHead), dwh = b.vector(kHead);
  Stream& s = b.stream();
  b.row("rms_norm forward", bytes({x, y}), [&] { rms_norm_forward(s, y, r, x, w, 1e-5f); });
  b.row("rms_norm backward", bytes({x, y, dx}), [&] { rms_norm_backward(s, dx, dw, y, x, w, r); });
  b.row("gated_rms_norm forward, 16 heads of 128", bytes({x, y, gate}),
        [&] { gated_rms_norm_forward(s, y, rh, x, gate, wh, 1e-5f); });
  b.row("gated_rms_norm backward", bytes({x, y, gate, dx, dgate}),
        [&] { gated_rms_norm_backward(s, dx, dgate, dwh, y, x, gate, wh, rh); });
  b.row("sigmoid_gate forward", bytes({x, y, gate}), [&] { sigmoid_gate_forward(s, y, x, gate); });
  b.row("sigmoid_gate backward", bytes({x, y, gate, dx, dgate}),
        [&] { sigmoid_gate_backward(s, dx, dgate, y, x, gate); });
}

void units(Bench& b) {
  const Tensor ab = b.tensor(kExpertRows, 2 * kF), dab = b.tensor(kExpertRows, 2 * kF), y = b.tensor(kExpertRows, kF);
  const Tensor p = b.vector(kExpertRows), dp = b.vector(kExpertRows);
  const Tensor a0 = ab.columns(0, kF), b0 = ab.columns(kF, kF), da = dab.columns(0, kF), db = dab.columns(kF, kF);
  Stream& s = b.stream();
  for (const Glu::Kind kind : {Glu::Kind::situ, Glu::Kind::silu}) {
    Glu glu;
    glu.kind = kind;
    const bool situ = kind == Glu::Kind::situ;
    b.row(situ ? "SiTU-GLU forward, row scale" : "SwiGLU forward, row scale", bytes({ab, y, p}),
          [&] { glu_forward(s, glu, y, a0, b0, p); });
    b.row(situ ? "SiTU-GLU backward, row scale" : "SwiGLU backward, row scale", bytes({ab, dab, y, p, dp}),
          [&] { glu_backward(s, glu, da, db, dp, y, a0, b0, p); });
  }
}

void convolutions(Bench& b) {
  const Tensor x = b.tensor(kN, kConv), y = b.tensor(kN, kConv), dx = b.tensor(kN, kConv);
  const Tensor w = b.tensor(kConv, 4, DType::f32), dw = b.tensor(kConv, 4, DType::f32);
  Stream& s = b.stream();
  b.row("short_conv forward, W = 4, C = 6144", bytes({x, y}), [&] { short_conv_forward(s, 8, kN / 8, y, x, w, {}); });
  b.row("short_conv backward", bytes({x, y, dx}), [&] { short_conv_backward(s, 8, kN / 8, dx, dw, y, x, w, {}); });
}

void embeddings(Bench& b) {
  const Tensor table = b.tensor(kV, kD), dtable = b.tensor(kV, kD, DType::f32), y = b.tensor(kN, kD);
  const Tensor dy = b.tensor(kN, kD, DType::f32), ids = b.tensor(1, kN, DType::i32).view({kN});
  // Token frequencies of a text, about: id k with probability proportional to 1 / (k + 3).
  std::vector<int32_t> host(static_cast<size_t>(kN));
  std::vector<double> weights(static_cast<size_t>(kV));
  for (size_t k = 0; k < weights.size(); ++k) weights[k] = 1.0 / static_cast<double>(k + 3);
  std::discrete_distribution<int32_t> zipf(weights.begin(), weights.end());
  std::mt19937 rng(2);
  for (int32_t& id : host) id = zipf(rng);
  Stream& s = b.stream();
  upload(s, ids, Tensor::of(host.data(), {kN}));
  wait(s);
  b.row("embedding forward", 2 * bytes({y}), [&] { embedding_forward(s, y, ids, table); });
  b.row("embedding backward, F32 gradient", bytes({dy}), [&] { embedding_backward(s, dtable, dy, ids); });
}

void sites(Bench& b, int completed) {
  ResidualSite site;
  ResidualSiteGrads grads;
  for (int j = 0; j < completed; ++j) {
    site.completed.push_back(b.tensor(kN, kD));
    grads.dcompleted.push_back(b.tensor(kN, kD, DType::f32));
  }
  const int64_t S = completed + 1;
  site.prefix_in = b.tensor(kN, kD), site.delta = b.tensor(kN, kD), site.prefix = b.tensor(kN, kD);
  site.mix_norm = b.vector(kD), site.mix_query = b.tensor(1, kD, DType::f32), site.out_norm = b.vector(kD);
  site.h = b.tensor(kN, kD), site.y = b.tensor(kN, kD), site.rstd = b.vector(kN);
  site.alpha = b.tensor(kN, S, DType::f32), site.mix_rstd = b.tensor(kN, S, DType::f32);
  grads.dprefix = b.tensor(kN, kD, DType::f32);
  grads.dmix_norm = b.vector(kD), grads.dmix_query = b.tensor(1, kD, DType::f32), grads.dout_norm = b.vector(kD);
  const Tensor dy = b.tensor(kN, kD);
  Stream& s = b.stream();
  const double row = bytes({dy});
  const auto name = [&](const char* what) { return text("residual_site ", what, ", ", S, " sources"); };
  b.row(name("forward").c_str(), row * static_cast<double>(completed + 5), [&] { residual_site_forward(s, site); });
  b.row(name("recompute_h").c_str(), row * static_cast<double>(S + 1), [&] { residual_site_recompute_h(s, site); });
  b.row(name("backward").c_str(), row * static_cast<double>(2 + 5 * S),
        [&] { residual_site_backward(s, site, grads, dy); });
}

}  // namespace

int main() {
  const DeviceCount devices = device_count();
  if (devices.count == 0) {
    std::printf("no GPU: %s\n", devices.reason.c_str());
    return 0;
  }
  std::printf("%s\n\n| operation | ms | MB | TB/s | %% of copy |\n|---|---|---|---|---|\n",
              device_properties(0).name.c_str());
  Bench b;
  const auto group = [&](const std::function<void()>& f) {
    const int64_t mark = b.stream().arena->keep_mark();
    f();
    b.stream().arena->release_keep(mark);
  };
  group([&] { copies(b); });
  group([&] { norms(b); });
  group([&] { units(b); });
  group([&] { convolutions(b); });
  group([&] { embeddings(b); });
  for (const int completed : {1, 4, 7}) group([&] { sites(b, completed); });
  return 0;
}
