// KDA on CUDA against the CPU.
//
// Inputs are rounded to the dtype under test first, so both sides compute from the same numbers.  F32 runs the
// recurrence (as do sizes, gates and alignments that the tensor-core form does not take); its bounds are the CPU's own
// between its two forms, doubled for the device's exponentials.  BF16 with K = V = 64 or 128 and the bounded gate runs
// the chunked form.  Its bounds:
//   o 5e-3, dq, dk, dv, states 8e-3: operands and results have 8 bits (2^-9 = 2e-3 each, four roundings on the way from
//     v to o, two more on the way back);
//   dgate, dbeta, dA_log, ddt_bias 2e-2: differences of terms several times their size.
#include <chrono>
#include <cstdio>

#include "tests/gpu/support.h"
#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

struct Bounds {
  double o, state, row, gate;  // o; states and their gradients; dq dk dv; dgate dbeta dA_log ddt_bias
};
constexpr Bounds kFloat{1e-5, 1e-5, 1e-4, 1e-4};
constexpr Bounds kChunked{5e-3, 8e-3, 8e-3, 2e-2};
// The recurrence in BF16 is fp32 inside: what it stores is rounded once, and backward starts from rounded states.
constexpr Bounds kRounded{3e-3, 1e-5, 6e-3, 6e-3};

// The device's side of a case: the same inputs, outputs of its own.
struct OnDevice {
  const KdaCase& c;
  DType t;
  int64_t pad;
  DeviceBuffer q, k, v, gate, beta, A_log, dt_bias, initial_state, document_start, d_o, d_final_state;
  DeviceBuffer o, final_state, saved, dq, dk, dv, dgate, dbeta, dA_log, ddt_bias, d_initial_state;

  // `padding` columns on either side of the rows of activations.
  explicit OnDevice(const KdaCase& host, DType dtype, int64_t padding = 0)
      : c(host),
        t(dtype),
        pad(padding),
        q(c.q, t, pad, pad),
        k(c.k, t, pad, pad),
        v(c.v, t, pad, pad),
        gate(c.gate, t, pad, pad),
        beta(c.beta, t, pad, pad),
        A_log({c.d.H}),
        dt_bias({c.d.H * c.d.K}),
        initial_state({c.d.B, c.d.H, c.d.K, c.d.V}),
        document_start({c.d.B, c.d.T}, DType::i32),
        d_o(c.d_o, t, pad, pad),
        d_final_state({c.d.B, c.d.H, c.d.K, c.d.V}),
        o({c.d.B * c.d.T, c.d.H * c.d.V}, t, pad, pad),
        final_state({c.d.B, c.d.H, c.d.K, c.d.V}),
        saved({kda_saved_elements(c.d, Device::cuda, t)}),
        dq({c.d.B * c.d.T, c.d.H * c.d.K}, t, pad, pad),
        dk({c.d.B * c.d.T, c.d.H * c.d.K}, t, pad, pad),
        dv({c.d.B * c.d.T, c.d.H * c.d.V}, t, pad, pad),
        dgate({c.d.B * c.d.T, c.d.H * c.d.K}, t, pad, pad),
        dbeta({c.d.B * c.d.T, c.d.H}, t, pad, pad),
        dA_log({c.d.H}),
        ddt_bias({c.d.H * c.d.K}),
        d_initial_state({c.d.B, c.d.H, c.d.K, c.d.V}) {
    A_log.upload(c.A_log);
    dt_bias.upload(c.dt_bias);
    initial_state.upload(c.initial_state);
    d_final_state.upload(c.d_final_state);
    if (c.with_documents) document_start.upload(c.document_start);
    dA_log.zero();
    ddt_bias.zero();
  }

  KdaInputs inputs() const {
    return {q,
            k,
            v,
            gate,
            beta,
            A_log,
            dt_bias,
            c.lower_bound,
            c.with_state ? *initial_state : Tensor(),
            c.with_documents ? *document_start : Tensor()};
  }
  KdaGrads grads() const { return {dq, dk, dv, dgate, dbeta, dA_log, ddt_bias, d_initial_state}; }

  OnDevice& run() {
    CudaStream s;
    s.run([&](Stream& stream) { kda_forward(stream, c.d, inputs(), o, final_state, saved); });
    s.run([&](Stream& stream) { kda_backward(stream, c.d, inputs(), saved, d_o, d_final_state, grads()); });
    return *this;
  }
  std::vector<std::pair<const char*, const DeviceBuffer*>> results() const {
    return {{"o", &o},
            {"final_state", &final_state},
            {"dq", &dq},
            {"dk", &dk},
            {"dv", &dv},
            {"dgate", &dgate},
            {"dbeta", &dbeta},
            {"dA_log", &dA_log},
            {"ddt_bias", &ddt_bias},
            {"d_initial_state", &d_initial_state}};
  }
};

// The activations of a case, rounded to what the device will read.
void round_inputs(KdaCase& c, DType t) {
  for (const Tensor& x : {*c.q, *c.k, *c.v, *c.gate, *c.beta, *c.d_o}) round_to(t, x);
}

bool chunked(const KdaCase& c, DType t) {
  return t == DType::bf16 && c.d.K == c.d.V && (c.d.K == 64 || c.d.K == 128) && c.lower_bound.has_value();
}
Bounds bounds_of(const KdaCase& c, DType t) {
  return t == DType::f32 ? kFloat : chunked(c, t) ? kChunked : kRounded;
}

void expect_results(const OnDevice& got, const KdaCase& want, const Bounds& b) {
  expect_close("o", got.o, want.o, b.o);
  expect_close("final_state", got.final_state, want.final_state, b.state);
  expect_close("dq", got.dq, want.dq, b.row);
  expect_close("dk", got.dk, want.dk, b.row);
  expect_close("dv", got.dv, want.dv, b.row);
  expect_close("dgate", got.dgate, want.dgate, b.gate);
  expect_close("dbeta", got.dbeta, want.dbeta, b.gate);
  expect_close("dA_log", got.dA_log, want.dA_log, b.gate);
  expect_close("ddt_bias", got.ddt_bias, want.ddt_bias, b.gate);
  expect_close("d_initial_state", got.d_initial_state, want.d_initial_state, std::max(b.state, b.row));
}

// Same inputs on both sides, set by `prepare`.
template <class F>
void expect_like_cpu(const KdaDims& d, DType t, F&& prepare) {
  SCOPED_TRACE(text(name_of(t), " B ", d.B, " T ", d.T, " H ", d.H, " K ", d.K, " V ", d.V));
  KdaCase c(d);
  prepare(c);
  round_inputs(c, t);
  c.run();
  OnDevice device(c, t);
  device.run();
  expect_results(device, c, bounds_of(c, t));
}

void as_it_is(KdaCase&) {}

void set_token(const Buffer& b, int64_t t, float value) {
  for (int64_t i = 0; i < b->cols(); ++i) b[t * b->cols() + i] = value;
}

bool all_zero(const DeviceBuffer& t) {
  for (float x : t.values()) {
    if (x != 0.f) return false;
  }
  return true;
}

constexpr int64_t kLengths[] = {1, 15, 16, 17, 63, 64, 65, 130, 200};

// ---------------------------------------------------------------- against the CPU

TEST(KdaCuda, Float) {
  for (int64_t T : kLengths) expect_like_cpu({2, T, 3, 16, 16}, DType::f32, as_it_is);
  for (auto [K, V] :
       {std::pair<int64_t, int64_t>{1, 1}, {24, 40}, {64, 64}, {128, 128}, {65, 33}, {256, 7}, {5, 256}}) {
    expect_like_cpu({1, 70, 2, K, V}, DType::f32, as_it_is);
  }
}

TEST(KdaCuda, Bf16Recurrence) {
  for (int64_t T : kLengths) expect_like_cpu({2, T, 3, 16, 16}, DType::bf16, as_it_is);
  expect_like_cpu({1, 70, 2, 64, 128}, DType::bf16, as_it_is);
}

TEST(KdaCuda, Bf16Chunked64) {
  for (int64_t T : kLengths) expect_like_cpu({2, T, 3, 64, 64}, DType::bf16, as_it_is);
}

TEST(KdaCuda, Bf16Chunked128) {
  for (int64_t T : kLengths) expect_like_cpu({1, T, 2, 128, 128}, DType::bf16, as_it_is);
}

// Slow decay: the state matters more than the chunk.
TEST(KdaCuda, OpenGate) {
  for (int64_t K : {16, 64, 128}) {
    expect_like_cpu({1, 200, 2, K, K}, DType::bf16, [](KdaCase& c) { c.gate.normal(5, 1.f, -4.f); });
  }
  expect_like_cpu({1, 200, 2, 64, 64}, DType::f32, [](KdaCase& c) { c.gate.normal(5, 1.f, -4.f); });
}

// T2: g = -5 everywhere.
TEST(KdaCuda, SaturatedGate) {
  for (int64_t K : {16, 64, 128}) {
    expect_like_cpu({1, 200, 2, K, K}, DType::bf16, [](KdaCase& c) { c.gate.normal(5, 0.5f, 20.f); });
    expect_like_cpu({1, 200, 2, K, K}, DType::bf16, [](KdaCase& c) {
      c.gate.normal(5, 0.5f, 3.f);
      c.lower_bound = -5.9f;
    });
  }
}

TEST(KdaCuda, SoftplusGate) {
  for (int64_t K : {16, 64, 128}) {
    for (DType t : {DType::f32, DType::bf16}) {
      expect_like_cpu({1, 130, 2, K, K}, t, [](KdaCase& c) {
        c.lower_bound = std::nullopt;
        c.gate.normal(5, 1.f, -2.f);
        for (int64_t i : {3, 20, 63, 64}) set_token(c.gate, i, 500.f);
      });
    }
  }
}

// Borders inside chunks and tiles, at chunk borders, documents of one token, several chunks long.
TEST(KdaCuda, Documents) {
  const auto prepare = [](KdaCase& c) { c.documents({5, 1, 10, 48, 64, 1, 71, 130, 3, 67}); };
  for (int64_t K : {16, 64, 128}) {
    expect_like_cpu({2, 200, 2, K, K}, DType::bf16, prepare);
    expect_like_cpu({2, 200, 2, K, K}, DType::bf16, [&](KdaCase& c) {
      prepare(c);
      c.gate.normal(5, 1.f, -4.f);
    });
  }
  expect_like_cpu({2, 200, 2, 24, 16}, DType::f32, prepare);
}

// Nothing crosses a border: another first document changes no bit of the second.  (Other gates would: the running sums
// of a chunk go on across a border, so what follows it is rounded differently.)
TEST(KdaCuda, DocumentsDoNotMeet) {
  for (int64_t border : {37, 64, 80}) {
    SCOPED_TRACE(border);
    KdaCase a({1, 150, 1, 64, 64}), b({1, 150, 1, 64, 64});
    for (KdaCase* c : {&a, &b}) {
      c->documents({border, 150 - border});
      c->gate.normal(5, 1.f, -4.f);
    }
    for (int64_t t = 0; t < border; ++t) {
      set_token(b.k, t, 3.f);
      set_token(b.v, t, -2.f);
      set_token(b.q, t, 1.f);
      set_token(b.d_o, t, 5.f);
    }
    OnDevice x(a, DType::bf16), y(b, DType::bf16);
    x.run();
    y.run();
    const auto same_end = [&](const char* name, const DeviceBuffer& p, const DeviceBuffer& q) {
      const std::vector<char> m = p.raw(), n = q.raw();
      const size_t from = m.size() / 150 * static_cast<size_t>(border);
      EXPECT_TRUE(std::equal(m.begin() + static_cast<std::ptrdiff_t>(from), m.end(),
                             n.begin() + static_cast<std::ptrdiff_t>(from)))
          << name;
      EXPECT_FALSE(std::equal(m.begin(), m.end(), n.begin())) << name;
    };
    same_end("o", x.o, y.o);
    same_end("dq", x.dq, y.dq);
    same_end("dk", x.dk, y.dk);
    same_end("dv", x.dv, y.dv);
    same_end("dbeta", x.dbeta, y.dbeta);
    expect_same_bits("final_state", x.final_state, y.final_state);
  }
}

// ---------------------------------------------------------------- what breaks chunked forms

// T1: a prefix gives the same bits whatever follows it, forward and (with no gradient behind it) backward.
TEST(KdaCuda, LaterTokensChangeNothing) {
  for (int64_t K : {64, 128}) {
    for (int64_t n : {1, 7, 8, 9, 15, 16, 17, 31, 40, 48, 63, 64, 65, 100}) {
      SCOPED_TRACE(text("K ", K, " prefix of ", n));
      KdaCase whole({1, 130, 1, K, K}), prefix({1, n, 1, K, K});
      whole.d_final_state.zero();
      prefix.d_final_state.zero();
      for (int64_t t = n; t < 130; ++t) {
        set_token(whole.d_o, t, 0.f);
        set_token(whole.gate, t, t % 2 == 0 ? 20.f : -8.f);
      }
      copy_rows(whole, 0, prefix);
      copy_values(prefix.initial_state, whole.initial_state);
      OnDevice x(whole, DType::bf16), y(prefix, DType::bf16);
      x.run();
      y.run();
      const auto same_start = [&](const char* name, const DeviceBuffer& p, const DeviceBuffer& q) {
        const std::vector<char> m = p.raw(), part = q.raw();
        EXPECT_TRUE(std::equal(part.begin(), part.end(), m.begin())) << name;
      };
      same_start("o", x.o, y.o);
      same_start("dq", x.dq, y.dq);
      same_start("dk", x.dk, y.dk);
      same_start("dv", x.dv, y.dv);
      same_start("dgate", x.dgate, y.dgate);
      same_start("dbeta", x.dbeta, y.dbeta);
      expect_same_bits("d_initial_state", x.d_initial_state, y.d_initial_state);
    }
  }
}

// T3: a token's score with itself has no decay in it, nor has the last token's write.
TEST(KdaCuda, NoGradientWithoutDecay) {
  for (float gate : {0.f, 20.f, -8.f}) {
    for (int64_t only : {17, 63, 64, 79}) {
      SCOPED_TRACE(text("gate ", gate, " token ", only));
      KdaCase c({1, 80, 2, 64, 64});
      c.gate.normal(5, 1.f, gate);
      c.with_state = false;
      for (int64_t t = 0; t < 80; ++t) {
        if (t == only) continue;
        set_token(c.v, t, 0.f);
        set_token(c.d_o, t, 0.f);
      }
      if (only != 79) c.d_final_state.zero();
      OnDevice device(c, DType::bf16);
      device.run();
      EXPECT_TRUE(all_zero(device.dgate));
      EXPECT_TRUE(all_zero(device.dA_log));
      EXPECT_FALSE(all_zero(device.dq));
    }
  }
}

// T4: steep, then open, with gradients of any size.
TEST(KdaCuda, SteepThenOpenAtEveryScale) {
  for (float scale : {1.f, 1e-4f, 1e-8f, 1e-10f, 1e4f, 1e6f}) {
    SCOPED_TRACE(text("scale ", scale));
    expect_like_cpu({1, 130, 2, 64, 64}, DType::bf16, [&](KdaCase& c) {
      for (int64_t t = 0; t < 130; ++t) set_token(c.gate, t, t % 16 < 13 ? 20.f : -3.f);
      c.A_log.zero();
      c.d_o.normal(9, scale);
      c.d_final_state.normal(10, scale);
    });
  }
}

// T6: exp(100) is not a float.
TEST(KdaCuda, HugeALog) {
  for (DType t : {DType::f32, DType::bf16}) {
    KdaCase c({1, 70, 2, 64, 64});
    c.A_log[0] = c.A_log[1] = 100.f;
    c.gate.normal(5, 1.f, 20.f);
    round_inputs(c, t);
    c.run();
    OnDevice device(c, t);
    device.run();
    expect_close("o", device.o, c.o, bounds_of(c, t).o);
    EXPECT_TRUE(all_zero(device.dgate));
    EXPECT_TRUE(all_zero(device.dA_log));
  }
}

double error_of(const DeviceBuffer& got, const Tensor& want) {
  const std::vector<float> g = got.values();
  return relative_error(Tensor::of(g.data(), {want.rows(), want.cols()}), want);
}

// T8: identical keys with an open gate.  What a token writes is a difference of values, and an output adds up all 64
// differences of its chunk, each rounded to 8 bits: 8 x 1.1e-3 of a value.
TEST(KdaCuda, RepeatedTokens) {
  for (int64_t K : {64, 128}) {
    for (float beta : {0.f, 2.f, 20.f}) {
      SCOPED_TRACE(text("K ", K, " beta logit ", beta));
      KdaCase c({1, 130, 2, K, K});
      for (int64_t t = 0; t < 130; ++t) {
        set_token(c.beta, t, beta);
        for (int64_t i = 0; i < c.k->cols(); ++i) c.k[t * c.k->cols() + i] = c.k[i];
      }
      c.gate.normal(5, 0.1f, -8.f);
      round_inputs(c, DType::bf16);
      c.run();
      OnDevice device(c, DType::bf16);
      device.run();
      EXPECT_LE(error_of(device.o, c.o), 1e-2);
      EXPECT_LE(error_of(device.final_state, c.final_state), 1e-2);
      EXPECT_LE(error_of(device.dq, c.dq), 2e-2);
      EXPECT_LE(error_of(device.dk, c.dk), 2e-2);
      EXPECT_LE(error_of(device.dv, c.dv), 2e-2);
      // A difference of two sums that nearly cancel when every key is the same: 3.13e-2 on an H200.
      EXPECT_LE(error_of(device.dbeta, c.dbeta), 4e-2);
    }
  }
}

// T10: rows of zeros.
TEST(KdaCuda, ZeroKeysAndQueries) {
  for (DType t : {DType::f32, DType::bf16}) {
    expect_like_cpu({1, 70, 2, 64, 64}, t, [](KdaCase& c) {
      for (int64_t i : {0, 7, 16, 39, 69}) {
        set_token(c.q, i, 0.f);
        set_token(c.k, i, 0.f);
      }
      // The norm's derivative there is 1000: those rows alone would decide every error.
      for (int64_t i : {0, 7, 16, 39, 69}) set_token(c.d_o, i, 0.f);
    });
  }
}

// ---------------------------------------------------------------- the rest of the contract

TEST(KdaCuda, SameBitsEveryRun) {
  for (int64_t K : {16, 64, 128}) {
    KdaCase c({3, 150, 2, K, K});
    c.documents({150, 70, 80, 150});
    OnDevice a(c, DType::bf16), b(c, DType::bf16);
    a.run();
    b.run();
    const auto x = a.results(), y = b.results();
    for (size_t i = 0; i < x.size(); ++i) expect_same_bits(x[i].first, *x[i].second, *y[i].second);
  }
}

// Column blocks: padding by 8 keeps the rows aligned and must not change a bit; padding by 3 sends the same problem
// through the recurrence.
TEST(KdaCuda, ColumnBlocks) {
  KdaCase c({2, 70, 2, 64, 64});
  round_inputs(c, DType::bf16);
  c.run();
  OnDevice plain(c, DType::bf16), aligned(c, DType::bf16, 8), odd(c, DType::bf16, 3);
  plain.run();
  aligned.run();
  odd.run();
  const auto x = plain.results(), y = aligned.results();
  for (size_t i = 0; i < x.size(); ++i) expect_same_bits(x[i].first, *x[i].second, *y[i].second);
  expect_results(odd, c, kRounded);
}

// Forward of one form, backward of the other: `saved` means the same to both.
TEST(KdaCuda, FormsShareWhatTheySave) {
  KdaCase c({1, 150, 2, 64, 64});
  round_inputs(c, DType::bf16);
  c.run();
  OnDevice a(c, DType::bf16), b(c, DType::bf16, 3);
  a.run();
  b.run();
  CudaStream s;
  s.run([&](Stream& stream) { kda_backward(stream, c.d, b.inputs(), a.saved, b.d_o, b.d_final_state, b.grads()); });
  expect_close("dq of the recurrence", b.dq, c.dq, kChunked.row);
  expect_close("dgate of the recurrence", b.dgate, c.dgate, kChunked.gate);
  s.run([&](Stream& stream) { kda_backward(stream, c.d, a.inputs(), b.saved, a.d_o, a.d_final_state, a.grads()); });
  expect_close("dq of the chunked form", a.dq, c.dq, kChunked.row);
  expect_close("dgate of the chunked form", a.dgate, c.dgate, kChunked.gate);
}

// Parameter gradients are added to; empty states mean zero and not wanted; without `saved` nothing else changes.
TEST(KdaCuda, EmptyTensors) {
  for (DType t : {DType::f32, DType::bf16}) {
    KdaCase c({1, 70, 2, 64, 64});
    c.initial_state.zero();
    c.d_final_state.zero();
    OnDevice a(c, t), b(c, t);
    a.run();
    KdaInputs in = b.inputs();
    in.initial_state = Tensor();
    KdaGrads g = b.grads();
    g.d_initial_state = Tensor();
    CudaStream s;
    s.run([&](Stream& stream) { kda_forward(stream, c.d, in, b.o, Tensor(), Tensor()); });
    expect_same_bits("o", a.o, b.o);
    s.run([&](Stream& stream) { kda_forward(stream, c.d, in, b.o, b.final_state, b.saved); });
    for (int i = 0; i < 2; ++i) {
      s.run([&](Stream& stream) { kda_backward(stream, c.d, in, b.saved, b.d_o, Tensor(), g); });
    }
    expect_same_bits("final_state", a.final_state, b.final_state);
    expect_same_bits("dq", a.dq, b.dq);
    const std::vector<float> once = a.dA_log.values(), twice = b.dA_log.values();
    for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], 2 * once[i]);
  }
}

// Decoding: a few tokens at a time from the state left by the ones before, against all at once.
TEST(KdaCuda, TokenByToken) {
  KdaCase c({1, 70, 2, 64, 64});
  round_inputs(c, DType::bf16);
  c.run();
  OnDevice all(c, DType::bf16);
  Buffer state({1, 2, 64, 64});
  state.copy(c.initial_state);
  CudaStream s;
  for (int64_t t = 0, n = 64; t < 70; t += n, n = 1) {
    KdaInputs in = all.inputs();
    const auto rows = [&](const Tensor& x) { return x.slice(t, n); };
    in.q = rows(in.q), in.k = rows(in.k), in.v = rows(in.v), in.gate = rows(in.gate), in.beta = rows(in.beta);
    const Tensor before = in.initial_state;
    s.run([&](Stream& stream) {
      kda_forward(stream, {1, n, 2, 64, 64}, in, rows(*all.o), before, Tensor());  // state in place
    });
  }
  expect_close("o", all.o, c.o, kChunked.o);
  expect_close("state", all.initial_state, c.final_state, kChunked.state);
}

// ---------------------------------------------------------------- speed

// Milliseconds per call, over as many calls as half a second takes.
double milliseconds(Stream& s, const std::function<void()>& f) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point from) {
    return std::chrono::duration<double, std::milli>(Clock::now() - from).count();
  };
  f();
  wait(s);
  Clock::time_point start = Clock::now();
  f();
  wait(s);
  const int calls = std::clamp(static_cast<int>(500 / since(start)), 3, 200);
  start = Clock::now();
  for (int i = 0; i < calls; ++i) f();
  wait(s);
  return since(start) / calls;
}

void time_shape(const KdaDims& d) {
  const int64_t rows = d.B * d.T, width = d.H * d.K;
  use_device(0);
  DeviceQueue queue(Device::cuda);
  const auto with_all = [&](Stream& s,
                            const std::function<void(const KdaInputs&, Tensor, Tensor, const KdaGrads&)>& f) {
    const auto bf = [&](int64_t cols) { return s.arena->keep({rows, cols}, DType::bf16, "timing"); };
    const auto f32 = [&](int64_t n) { return s.arena->keep({n}, DType::f32, "timing"); };
    KdaInputs in;
    in.q = bf(width), in.k = bf(width), in.v = bf(width), in.gate = bf(width), in.beta = bf(d.H);
    in.A_log = f32(d.H), in.dt_bias = f32(width);
    KdaGrads g{bf(width), bf(width), bf(width), bf(width), bf(d.H), f32(d.H), f32(width), Tensor()};
    f(in, bf(width), f32(kda_saved_elements(d, Device::cuda, DType::bf16)), g);
  };
  const int64_t bytes = planned_bytes(Device::cuda, [&](Stream& s) {
    with_all(s, [&](const KdaInputs& in, Tensor o, Tensor saved, const KdaGrads& g) {
      kda_forward(s, d, in, o, Tensor(), saved);
      kda_backward(s, d, in, saved, o, Tensor(), g);
    });
  });
  Arena arena(Device::cuda, bytes);
  Stream s(arena);
  s.queue = queue.get();
  with_all(s, [&](const KdaInputs& in, Tensor o, Tensor saved, const KdaGrads& g) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    std::vector<bf16> numbers(1 << 20);
    for (bf16& x : numbers) x = bf16(normal(rng));
    const auto fill = [&](const Tensor& t) {
      const int64_t n = t.bytes(), piece = static_cast<int64_t>(numbers.size()) * 2;
      for (int64_t at = 0; at < n; at += piece) {
        const int64_t part = std::min(piece, n - at);
        cuda::copy_rows(queue.get(), static_cast<char*>(t.data) + at, part, numbers.data(), part, part, 1);
      }
    };
    for (const Tensor& t : {in.q, in.k, in.v, in.gate, in.beta}) fill(t);
    const std::vector<float> zeros(static_cast<size_t>(width), 0.f);
    const auto clear = [&](const Tensor& t) {
      cuda::copy_rows(queue.get(), t.data, t.bytes(), zeros.data(), t.bytes(), t.bytes(), 1);
    };
    for (const Tensor& t : {in.A_log, in.dt_bias, g.dA_log, g.ddt_bias}) clear(t);
    wait(s);
    const double inference = milliseconds(s, [&] { kda_forward(s, d, in, o, Tensor(), Tensor()); });
    const double forward = milliseconds(s, [&] { kda_forward(s, d, in, o, Tensor(), saved); });
    const double both = milliseconds(s, [&] {
      kda_forward(s, d, in, o, Tensor(), saved);
      kda_backward(s, d, in, saved, o, Tensor(), g);
    });
    std::printf("KDA B %lld T %lld H %lld K %lld: forward %.3f ms (without saving %.3f), forward + backward %.3f ms\n",
                static_cast<long long>(d.B), static_cast<long long>(d.T), static_cast<long long>(d.H),
                static_cast<long long>(d.K), forward, inference, both);
    EXPECT_GT(both, forward);
  });
}

TEST(KdaTiming, LongRow) {
  time_shape({1, 8192, 96, 128, 128});
}
TEST(KdaTiming, Batch) {
  time_shape({8, 4096, 16, 128, 128});
}

}  // namespace
