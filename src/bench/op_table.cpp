#include "src/bench/op_table.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/attention.h"
#include "kernels/attn_res/attn_res.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/transfer.h"
#include "kernels/embedding/embedding.h"
#include "kernels/experts/experts.h"
#include "kernels/gemm/gemm.h"
#include "kernels/glu/glu.h"
#include "kernels/kda/kda.h"
#include "kernels/loss/loss.h"
#include "kernels/norm/norm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/router/balancing.h"
#include "kernels/router/router.h"
#include "kernels/short_conv/short_conv.h"
#include "src/model/random.h"

namespace kestrel {
namespace {

double bytes_of(std::initializer_list<Tensor> tensors) {
  double n = 0;
  for (const Tensor& t : tensors) n += static_cast<double>(t.bytes());
  return n;
}

double product(std::initializer_list<int64_t> factors) {
  double p = 1;
  for (int64_t f : factors) p *= static_cast<double>(f);
  return p;
}

// Sizes of bench_2p8b on a GPU (8 x 4096 tokens), of a small model on the CPU.
const OpDim kTokens{"N", 32768, 1024}, kWidth{"D", 2048, 256}, kRows{"B", 8, 1}, kLength{"T", 4096, 512};
const OpDim kHeads{"H", 16, 4}, kKey{"K", 128, 64, 1024}, kVocabulary{"V", 32768, 2048};
const OpDim kExperts{"E", 64, 16, 16384}, kSlots{"k", 8, 2, 1024};

// ---------------------------------------------------------------------------------------------------------- plain

OpCase copy(OpOperands& o, const OpShape& d) {
  const Tensor x = o.noise(d["N"], d["D"]), y = o.zeros(d["N"], d["D"]);
  return {bytes_of({x, y}), 0, [=](Stream& s) { copy_cast(s, y, x); }};
}

OpCase add(OpOperands& o, const OpShape& d) {
  const Tensor x = o.noise(d["N"], d["D"], DType::f32), y = o.zeros(d["N"], d["D"], DType::f32);
  return {bytes_of({x, y, y}), 0, [=](Stream& s) { add_into(s, y, x, 0.5f); }};
}

// ---------------------------------------------------------------------------------------------------------- norms,
// gates

OpCase rms_norm(OpOperands& o, const OpShape& d, bool backward) {
  const Tensor x = o.noise(d["N"], d["D"]), y = o.noise(d["N"], d["D"]), dx = o.zeros(d["N"], d["D"]);
  const Tensor w = o.vector(d["D"]), dw = o.zero_vector(d["D"]), rstd = o.vector(d["N"]);
  if (backward) return {bytes_of({x, y, dx}), 0, [=](Stream& s) { rms_norm_backward(s, dx, dw, y, x, w, rstd); }};
  return {bytes_of({x, y}), 0, [=](Stream& s) { rms_norm_forward(s, y, rstd, x, w, 1e-5f); }};
}

OpCase gated_rms_norm(OpOperands& o, const OpShape& d, bool backward) {
  const int64_t N = d["N"], C = d["H"] * d["K"];
  const Tensor x = o.noise(N, C), y = o.noise(N, C), gate = o.noise(N, C), dx = o.zeros(N, C), dgate = o.zeros(N, C);
  const Tensor w = o.vector(d["K"]), dw = o.zero_vector(d["K"]), rstd = o.noise(N, d["H"], DType::f32);
  if (backward) {
    return {bytes_of({x, y, gate, dx, dgate}), 0,
            [=](Stream& s) { gated_rms_norm_backward(s, dx, dgate, dw, y, x, gate, w, rstd); }};
  }
  return {bytes_of({x, y, gate}), 0, [=](Stream& s) { gated_rms_norm_forward(s, y, rstd, x, gate, w, 1e-5f); }};
}

OpCase sigmoid_gate(OpOperands& o, const OpShape& d, bool backward) {
  const Tensor x = o.noise(d["N"], d["D"]), y = o.noise(d["N"], d["D"]), gate = o.noise(d["N"], d["D"]);
  const Tensor dx = o.zeros(d["N"], d["D"]), dgate = o.zeros(d["N"], d["D"]);
  if (backward) {
    return {bytes_of({x, y, gate, dx, dgate}), 0, [=](Stream& s) { sigmoid_gate_backward(s, dx, dgate, y, x, gate); }};
  }
  return {bytes_of({x, y, gate}), 0, [=](Stream& s) { sigmoid_gate_forward(s, y, x, gate); }};
}

// On rows of experts, with the probability of each row, as the MoE layer calls it.
OpCase glu(OpOperands& o, const OpShape& d, Glu::Kind kind, bool backward) {
  const int64_t N = d["rows"], F = d["F"];
  const Tensor ab = o.noise(N, 2 * F), dab = o.zeros(N, 2 * F), y = o.noise(N, F), p = o.vector(N);
  const Tensor dp = o.zero_vector(N);
  const Tensor a = ab.columns(0, F), b = ab.columns(F, F), da = dab.columns(0, F), db = dab.columns(F, F);
  Glu unit;
  unit.kind = kind;
  if (backward) {
    return {bytes_of({ab, dab, y, p, dp}), 0, [=](Stream& s) { glu_backward(s, unit, da, db, dp, y, a, b, p); }};
  }
  return {bytes_of({ab, y, p}), 0, [=](Stream& s) { glu_forward(s, unit, y, a, b, p); }};
}

OpCase short_conv(OpOperands& o, const OpShape& d, bool backward) {
  const int64_t B = d["B"], T = d["T"], C = d["C"];
  const Tensor x = o.noise(B * T, C), y = o.noise(B * T, C), dx = o.zeros(B * T, C);
  const Tensor w = o.noise(C, d["W"], DType::f32), dw = o.zeros(C, d["W"], DType::f32);
  if (backward) {
    return {bytes_of({x, y, dx}), 0, [=](Stream& s) { short_conv_backward(s, B, T, dx, dw, y, x, w, {}); }};
  }
  return {bytes_of({x, y}), 0, [=](Stream& s) { short_conv_forward(s, B, T, y, x, w, {}); }};
}

// Token frequencies about those of a text: id = floor(3 (V/3 + 1)^u) - 3 has density proportional to 1 / (id + 3).
OpCase embedding(OpOperands& o, const OpShape& d, bool backward) {
  const int64_t N = d["N"], V = d["V"];
  const Tensor y = o.noise(N, d["D"], backward ? DType::f32 : o.dtype());
  const CounterRandom random(2, "ids");
  const auto id = [&](int64_t i) {
    const double u = random.uniform(static_cast<uint64_t>(i));
    return std::clamp(static_cast<int64_t>(3 * std::pow(static_cast<double>(V) / 3 + 1, u)) - 3, int64_t{0}, V - 1);
  };
  const Tensor ids = o.integers(N, id);
  // Rows of the table that are touched count once.
  std::vector<bool> touched(static_cast<size_t>(V));
  for (int64_t i = 0; i < N; ++i) touched[static_cast<size_t>(id(i))] = true;
  const double rows = static_cast<double>(std::count(touched.begin(), touched.end(), true));
  const double share = rows / static_cast<double>(V);
  if (backward) {
    const Tensor dtable = o.zeros(V, d["D"], DType::f32);
    return {bytes_of({y}) + 2 * share * bytes_of({dtable}), 0,
            [=](Stream& s) { embedding_backward(s, dtable, y, ids); }};
  }
  const Tensor table = o.noise(V, d["D"]);
  return {bytes_of({y}) + share * bytes_of({table}), 0, [=](Stream& s) { embedding_forward(s, y, ids, table); }};
}

// ---------------------------------------------------------------------------------------------------------- depth

enum class Site { forward, recompute, backward };

OpCase residual_site(OpOperands& o, const OpShape& d, Site what) {
  const int64_t N = d["N"], D = d["D"], completed = d["completed"], S = completed + 1;
  ResidualSite site;
  ResidualSiteGrads grads;
  for (int64_t j = 0; j < completed; ++j) {
    site.completed.push_back(o.noise(N, D));
    if (what == Site::backward) grads.dcompleted.push_back(o.zeros(N, D, DType::f32));
  }
  site.prefix_in = o.noise(N, D), site.delta = o.noise(N, D), site.prefix = o.noise(N, D);
  site.mix_norm = o.vector(D), site.mix_query = o.noise(1, D, DType::f32), site.out_norm = o.vector(D);
  site.h = o.noise(N, D), site.y = o.zeros(N, D), site.rstd = o.vector(N);
  site.alpha = o.noise(N, S, DType::f32), site.mix_rstd = o.noise(N, S, DType::f32);
  const double row = bytes_of({site.h});
  const double sources = static_cast<double>(completed);
  switch (what) {
    case Site::forward:  // reads completed, prefix_in, delta; writes prefix, h, y
      return {row * (sources + 5), 0, [=](Stream& s) {
                ResidualSite r = site;
                residual_site_forward(s, r);
              }};
    case Site::recompute:
      return {row * (sources + 2), 0, [=](Stream& s) { residual_site_recompute_h(s, site); }};
    case Site::backward:
      break;
  }
  const Tensor dy = o.noise(N, D);
  grads.dprefix = o.zeros(N, D, DType::f32);
  grads.dmix_norm = o.zero_vector(D), grads.dmix_query = o.zeros(1, D, DType::f32), grads.dout_norm = o.zero_vector(D);
  const double gradient = bytes_of({grads.dprefix});
  // Reads dy, h and every source; adds to the gradient of every source.
  return {row * (2 + sources + 1) + 2 * gradient * (sources + 1), 0,
          [=](Stream& s) { residual_site_backward(s, site, grads, dy); }};
}

// ---------------------------------------------------------------------------------------------------------- products

enum class Linear { forward, input, weight };

OpCase linear(OpOperands& o, const OpShape& d, Linear what) {
  const int64_t N = d["N"], in = d["in"], out = d["out"];
  const Tensor x = o.noise(N, in), w = o.noise(out, in), y = o.noise(N, out), dw = o.zeros(out, in, DType::f32);
  const double flops = 2 * product({N, in, out});
  switch (what) {
    case Linear::forward:
      return {bytes_of({x, w, y}), flops, [=](Stream& s) { linear_forward(s, y, x, w); }};
    case Linear::input:
      return {bytes_of({x, w, y}), flops, [=](Stream& s) { linear_backward(s, x, {}, y, x, w); }};
    case Linear::weight:
      return {bytes_of({x, y, dw, dw}), flops, [=](Stream& s) { linear_backward(s, {}, dw, y, x, w); }};
  }
  return {};
}

OpCase attention(OpOperands& o, const OpShape& d, bool backward) {
  const AttentionDims dims{d["B"], d["T"], d["H"], d["Dqk"], d["Dv"]};
  const int64_t N = dims.B * dims.T;
  const Tensor q = o.noise(N, dims.H * dims.Dqk), k = o.noise(N, dims.H * dims.Dqk), v = o.noise(N, dims.H * dims.Dv);
  const Tensor out = o.zeros(N, dims.H * dims.Dv),
               lse = o.zero_vector(dims.B * dims.H * dims.T).view({dims.B, dims.H, dims.T});
  // Half of the scores are visible.
  const double pairs = product({dims.B, dims.H, dims.T, dims.T}) / 2;
  const double width = static_cast<double>(dims.Dqk + dims.Dv);
  if (!backward) {
    return {bytes_of({q, k, v, out}), 2 * pairs * width,
            [=](Stream& s) { attention_forward(s, dims, out, lse, q, k, v, {}); }};
  }
  attention_forward(o.stream(), dims, out, lse, q, k, v, {});
  const Tensor d_o = o.noise(N, dims.H * dims.Dv);
  const Tensor dq = o.zeros(N, q.cols()), dk = o.zeros(N, k.cols()), dv = o.zeros(N, v.cols());
  return {bytes_of({q, k, v, out, d_o, dq, dk, dv}), 2 * pairs * (2 * width + static_cast<double>(dims.Dqk)),
          [=](Stream& s) { attention_backward(s, dims, dq, dk, dv, d_o, out, lse, q, k, v, {}); }};
}

OpCase kda(OpOperands& o, const OpShape& d, bool backward) {
  const KdaDims dims{d["B"], d["T"], d["H"], d["K"], d["K"]};
  const int64_t N = dims.B * dims.T, C = dims.H * dims.K;
  KdaInputs in;
  in.q = o.noise(N, C), in.k = o.noise(N, C), in.v = o.noise(N, C), in.gate = o.noise(N, C);
  in.beta = o.noise(N, dims.H), in.A_log = o.zero_vector(dims.H), in.dt_bias = o.vector(C);
  const Tensor out = o.zeros(N, C);
  const Tensor saved = o.zero_vector(kda_saved_elements(dims, o.device(), o.dtype()));
  // Per token and head: four products with the [K,K] state and six half products of 64-token tiles.
  const double flops = product({N, dims.H}) * (8 * product({dims.K, dims.K}) + 6 * 64 * product({dims.K}));
  if (!backward) {
    return {bytes_of({in.q, in.k, in.v, in.gate, out}), flops,
            [=](Stream& s) { kda_forward(s, dims, in, out, {}, saved); }};
  }
  kda_forward(o.stream(), dims, in, out, {}, saved);
  const Tensor d_o = o.noise(N, C);
  KdaGrads g;
  g.dq = o.zeros(N, C), g.dk = o.zeros(N, C), g.dv = o.zeros(N, C), g.dgate = o.zeros(N, C);
  g.dbeta = o.zeros(N, dims.H), g.dA_log = o.zero_vector(dims.H), g.ddt_bias = o.zero_vector(C);
  return {bytes_of({in.q, in.k, in.v, in.gate, d_o, g.dq, g.dk, g.dv, g.dgate}), 2 * flops,
          [=](Stream& s) { kda_backward(s, dims, in, saved, d_o, {}, g); }};
}

// ---------------------------------------------------------------------------------------------------------- experts

OpCase route(OpOperands& o, const OpShape& d, bool backward) {
  const int64_t N = d["N"], E = d["E"], k = d["k"];
  Routing r;
  r.experts = E;
  r.k = r.slots = k;
  const Tensor logits = o.noise(N, E, DType::f32), bias = o.zero_vector(E), index = o.zeros(N, k, DType::i32);
  const Tensor weight = o.zeros(N, k, DType::f32), score = o.zeros(N, k, DType::f32), cutoff = o.zero_vector(N);
  const Tensor load = o.zero_vector(E, DType::i32);
  const auto forward = [=](Stream& s) { route_forward(s, r, index, weight, score, cutoff, load, logits, bias); };
  if (!backward) return {bytes_of({logits, index, weight, score, cutoff}), 0, forward};
  forward(o.stream());
  const Tensor dweight = o.noise(N, k, DType::f32), dlogits = o.zeros(N, E, DType::f32);
  return {bytes_of({dlogits, index, dweight, score}), 0,
          [=](Stream& s) { route_backward(s, r, dlogits, dweight, index, score); }};
}

OpCase histogram(OpOperands& o, const OpShape& d) {
  const int64_t N = d["N"], E = d["E"];
  const Tensor logits = o.noise(N, E, DType::f32), bias = o.zero_vector(E), hist = o.zeros(E, d["bins"], DType::i32);
  const Tensor cutoff = o.vector(N);
  return {bytes_of({logits, cutoff}), 0, [=](Stream& s) { quantile_histogram(s, hist, logits, cutoff, bias); }};
}

// A plan of N tokens with k different experts each, about equally often.
DispatchPlan plan_of(OpOperands& o, const OpShape& d, Tensor* index) {
  const int64_t N = d["N"], E = d["E"], k = d["k"];
  const CounterRandom random(3, "experts");
  *index = o.integers(N * k, [&](int64_t i) {
              const int64_t first =
                  static_cast<int64_t>(random.uniform(static_cast<uint64_t>(i / k)) * static_cast<double>(E));
              return (first + i % k) % E;
            }).view({N, k});
  DispatchPlan p;
  p.row_of = o.zeros(N, k, DType::i32);
  p.token_of = o.zero_vector(N * k, DType::i32);
  p.offsets = o.stream().arena->keep({E + 1}, DType::i64, "operands");
  dispatch_plan(o.stream(), p, *index);
  return p;
}

OpCase dispatch(OpOperands& o, const OpShape& d) {
  Tensor index;
  const DispatchPlan p = plan_of(o, d, &index);
  return {bytes_of({index, p.row_of, p.token_of}), 0, [=](Stream& s) { dispatch_plan(s, p, index); }};
}

OpCase move_rows(OpOperands& o, const OpShape& d, bool sum) {
  Tensor index;
  const DispatchPlan p = plan_of(o, d, &index);
  const Tensor x = o.noise(d["N"], d["D"]), rows = o.noise(d["N"] * d["k"], d["D"]);
  return {bytes_of({x, rows, index}), 0, [=](Stream& s) {
            if (sum) return sum_rows(s, x, rows, p);
            gather_rows(s, rows, x, p);
          }};
}

OpCase grouped_linear(OpOperands& o, const OpShape& d, Linear what) {
  Tensor index;
  const DispatchPlan p = plan_of(o, d, &index);
  const int64_t R = d["N"] * d["k"], E = d["E"], in = d["in"], out = d["out"];
  const Tensor x = o.noise(R, in), y = o.noise(R, out), w = o.noise(E * out, in).view({E, out, in});
  const Tensor dw = o.zeros(E * out, in, DType::f32).view({E, out, in});
  const double flops = 2 * product({R, in, out});
  switch (what) {
    case Linear::forward:
      return {bytes_of({x, w, y}), flops, [=](Stream& s) { grouped_linear_forward(s, y, x, w, p.offsets); }};
    case Linear::input:
      return {bytes_of({x, w, y}), flops, [=](Stream& s) { grouped_linear_backward_input(s, x, y, w, p.offsets); }};
    case Linear::weight:
      return {bytes_of({x, y, dw, dw}), flops,
              [=](Stream& s) { grouped_linear_backward_weight(s, dw, y, x, p.offsets); }};
  }
  return {};
}

// ---------------------------------------------------------------------------------------------------------- the step's
// end

OpCase cross_entropy(OpOperands& o, const OpShape& d) {
  const int64_t N = d["N"], D = d["D"], V = d["V"];
  const Tensor x = o.noise(N, D), w = o.noise(V, D), dx = o.zeros(N, D), dw = o.zeros(V, D, DType::f32);
  const CounterRandom random(4, "targets");
  const Tensor targets = o.integers(N, [&](int64_t i) {
    return static_cast<int64_t>(random.uniform(static_cast<uint64_t>(i)) * static_cast<double>(V));
  });
  const Tensor losses = o.zero_vector(N);
  return {bytes_of({x, w, dx, dw, dw}), 6 * product({N, D, V}),
          [=](Stream& s) { linear_cross_entropy(s, losses, dx, dw, x, w, targets, 1e-4f); }};
}

OpCase adamw(OpOperands& o, const OpShape& d) {
  const int64_t n = d["n"];
  const Tensor p = o.noise(1, n, DType::f32), g = o.noise(1, n, DType::f32), m = o.zeros(1, n, DType::f32);
  const Tensor v = o.zeros(1, n, DType::f32);
  AdamW h{};
  h.lr = 1e-6f;
  return {bytes_of({p, p, g, m, m, v, v}), 0, [=](Stream& s) { adamw_step(s, h, p, g, m, v, 1.f); }};
}

OpCase muon(OpOperands& o, const OpShape& d) {
  const int64_t n = d["count"], rows = d["rows"], cols = d["cols"];
  const auto three = [&](Tensor t) { return t.view({n, rows, cols}); };
  const Tensor p = three(o.noise(n * rows, cols, DType::f32)), g = three(o.noise(n * rows, cols, DType::f32));
  const Tensor m = three(o.zeros(n * rows, cols, DType::f32));
  Muon h{};
  h.lr = 1e-6f;
  // Per step of Newton-Schulz: X X^T, A A and B X.
  const double a = static_cast<double>(std::min(rows, cols)), b = static_cast<double>(std::max(rows, cols));
  const double flops = static_cast<double>(n) * h.ns_steps * (4 * a * a * b + 2 * a * a * a);
  return {bytes_of({p, p, g, m, m}), flops, [=](Stream& s) { muon_step(s, h, p, g, m, 0, 1.f); }};
}

OpCase square_sum(OpOperands& o, const OpShape& d) {
  const Tensor g = o.noise(1, d["n"], DType::f32), out = o.zeros(1, 1, DType::f64);
  return {bytes_of({g}), 0, [=](Stream& s) { sum_of_squares(s, out.view({1}), {g}); }};
}

// ---------------------------------------------------------------------------------------------------------- all of
// them

std::vector<OpEntry> make_table() {
  using O = OpOperands&;
  using S = const OpShape&;
  const std::vector<OpDim> matrix{kTokens, kWidth}, heads{kTokens, kHeads, kKey};
  const std::vector<OpDim> expert_rows{{"rows", 262144, 2048}, {"F", 1024, 128}};
  const std::vector<OpDim> conv{kRows, kLength, {"C", 6144, 768}, {"W", 4, 4, 8}};
  const std::vector<OpDim> linear_dims{kTokens, {"in", 2048, 256}, {"out", 2048, 256}};
  const std::vector<OpDim> attention_dims{kRows, kLength, kHeads, {"Dqk", 192, 96}, {"Dv", 128, 64}};
  const std::vector<OpDim> kda_dims{kRows, kLength, kHeads, kKey};
  const std::vector<OpDim> site{kTokens, kWidth, {"completed", 4, 2, 20000}};
  const std::vector<OpDim> router{kTokens, kExperts, kSlots};
  const std::vector<OpDim> moved{kTokens, kExperts, kSlots, {"D", 1024, 128}};
  const std::vector<OpDim> grouped{kTokens, kExperts, kSlots, {"in", 1024, 128}, {"out", 1024, 128}};
  const std::vector<OpDim> flat{{"n", 1 << 28, 1 << 20}};
  const auto fewer = [](S d) -> std::string {
    if (d["k"] > d["E"]) return text("k is ", d["k"], ", more than the E=", d["E"], " experts.");
    if (d["N"] <= INT32_MAX / d["k"]) return "";
    return text("N=", d["N"], " tokens of k=", d["k"], " experts are ", d["N"] * d["k"], " rows, at most ", INT32_MAX,
                " have a number.");
  };
  const auto situ = Glu::Kind::situ, silu = Glu::Kind::silu;
  return {
      {"copy", matrix, copy},
      {"add_into", matrix, add},
      {"embedding_forward", {kTokens, kWidth, kVocabulary}, [](O o, S d) { return embedding(o, d, false); }},
      {"embedding_backward", {kTokens, kWidth, kVocabulary}, [](O o, S d) { return embedding(o, d, true); }},
      {"residual_site_forward", site, [](O o, S d) { return residual_site(o, d, Site::forward); }},
      {"residual_site_recompute", site, [](O o, S d) { return residual_site(o, d, Site::recompute); }},
      {"residual_site_backward", site, [](O o, S d) { return residual_site(o, d, Site::backward); }},
      {"rms_norm_forward", matrix, [](O o, S d) { return rms_norm(o, d, false); }},
      {"rms_norm_backward", matrix, [](O o, S d) { return rms_norm(o, d, true); }},
      {"gated_rms_norm_forward", heads, [](O o, S d) { return gated_rms_norm(o, d, false); }},
      {"gated_rms_norm_backward", heads, [](O o, S d) { return gated_rms_norm(o, d, true); }},
      {"sigmoid_gate_forward", matrix, [](O o, S d) { return sigmoid_gate(o, d, false); }},
      {"sigmoid_gate_backward", matrix, [](O o, S d) { return sigmoid_gate(o, d, true); }},
      {"short_conv_forward", conv, [](O o, S d) { return short_conv(o, d, false); }},
      {"short_conv_backward", conv, [](O o, S d) { return short_conv(o, d, true); }},
      {"kda_forward", kda_dims, [](O o, S d) { return kda(o, d, false); }},
      {"kda_backward", kda_dims, [](O o, S d) { return kda(o, d, true); }},
      {"attention_forward", attention_dims, [](O o, S d) { return attention(o, d, false); }},
      {"attention_backward", attention_dims, [](O o, S d) { return attention(o, d, true); }},
      {"linear_forward", linear_dims, [](O o, S d) { return linear(o, d, Linear::forward); }},
      {"linear_backward_input", linear_dims, [](O o, S d) { return linear(o, d, Linear::input); }},
      {"linear_backward_weight", linear_dims, [](O o, S d) { return linear(o, d, Linear::weight); }},
      {"route_forward", router, [](O o, S d) { return route(o, d, false); }, fewer},
      {"route_backward", router, [](O o, S d) { return route(o, d, true); }, fewer},
      {"quantile_histogram", {kTokens, kExperts, {"bins", 1000, 1000, 1 << 20}}, histogram},
      {"dispatch_plan", router, dispatch, fewer},
      {"gather_rows", moved, [](O o, S d) { return move_rows(o, d, false); }, fewer},
      {"sum_rows", moved, [](O o, S d) { return move_rows(o, d, true); }, fewer},
      {"situ_glu_forward", expert_rows, [=](O o, S d) { return glu(o, d, situ, false); }},
      {"situ_glu_backward", expert_rows, [=](O o, S d) { return glu(o, d, situ, true); }},
      {"swiglu_forward", expert_rows, [=](O o, S d) { return glu(o, d, silu, false); }},
      {"swiglu_backward", expert_rows, [=](O o, S d) { return glu(o, d, silu, true); }},
      {"grouped_linear_forward", grouped, [](O o, S d) { return grouped_linear(o, d, Linear::forward); }, fewer},
      {"grouped_linear_backward_input", grouped, [](O o, S d) { return grouped_linear(o, d, Linear::input); }, fewer},
      {"grouped_linear_backward_weight", grouped, [](O o, S d) { return grouped_linear(o, d, Linear::weight); }, fewer},
      {"linear_cross_entropy", {kTokens, kWidth, kVocabulary}, cross_entropy},
      {"adamw", flat, adamw},
      {"muon", {{"count", 64, 4}, {"rows", 1024, 128}, {"cols", 1024, 128}}, muon},
      {"sum_of_squares", flat, square_sum},
  };
}

}  // namespace

const std::vector<OpEntry>& op_table() {
  static const std::vector<OpEntry> table = make_table();
  return table;
}

}  // namespace kestrel
