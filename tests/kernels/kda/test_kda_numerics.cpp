// What breaks chunked linear attention in practice: leaks from later tokens, saturated and unbounded gates, repeated
// and zero keys, cancellation.  The numbers T1 ... are those of the README's table.
#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

bool all_zero(const Tensor& t) {
  for (int64_t i = 0; i < t.numel(); ++i) {
    if (t.f32()[i] != 0.f) return false;
  }
  return true;
}

void expect_finite(const KdaCase& c) {
  for (auto [name, t] : c.outputs()) EXPECT_TRUE(all_finite(t)) << name;
  for (auto [name, t] : c.gradients()) EXPECT_TRUE(all_finite(t)) << name;
}

// Both forms on the same inputs, which `prepare` sets.  Limits as in test_kda_forms.cpp, unless a test says otherwise.
template <class F>
void expect_like_recurrence(const KdaDims& d, F&& prepare, double outputs = 5e-6, double gradients = 5e-5) {
  KdaCase a(d), b(d);
  prepare(a);
  prepare(b);
  a.run(Form::chunked);
  b.run(Form::recurrence);
  expect_finite(a);
  const auto oa = a.outputs(), ob = b.outputs(), ga = a.gradients(), gb = b.gradients();
  for (size_t i = 0; i < oa.size(); ++i) EXPECT_LE(relative_error(oa[i].second, ob[i].second), outputs) << oa[i].first;
  for (size_t i = 0; i < ga.size(); ++i) {
    EXPECT_LE(relative_error(ga[i].second, gb[i].second), gradients) << ga[i].first;
  }
}

void set_token(const Buffer& b, int64_t t, float value) {
  for (int64_t i = 0; i < b->cols(); ++i) b[t * b->cols() + i] = value;
}

// T1: every prefix, forward.  Later tokens are there and differ (gates among them), and not one bit changes.
TEST(KdaCausality, OutputsOfAPrefixDoNotSeeLaterTokens) {
  KdaCase whole({1, 130, 1, 24, 8});
  whole.run();
  for (int64_t n = 1; n <= 130; ++n) {
    KdaCase prefix({1, n, 1, 24, 8});
    copy_rows(whole, 0, prefix);
    copy_values(prefix.initial_state, whole.initial_state);
    prefix.run();
    ASSERT_TRUE(same_bits((*whole.o).slice(0, n), prefix.o)) << "prefix of " << n;
  }
}

// T1: every prefix, backward.  With no gradient on later tokens they change nothing, and receive nothing.
TEST(KdaCausality, GradientsOfAPrefixDoNotSeeLaterTokens) {
  for (int64_t n = 1; n <= 130; ++n) {
    SCOPED_TRACE(text("prefix of ", n));
    KdaCase whole({1, 130, 1, 24, 8}), prefix({1, n, 1, 24, 8});
    for (int64_t t = n; t < 130; ++t) set_token(whole.d_o, t, 0.f);
    whole.d_final_state.zero();
    copy_rows(whole, 0, prefix);
    copy_values(prefix.initial_state, whole.initial_state);
    prefix.d_final_state.zero();
    whole.run();
    prefix.run();
    for (auto [all, part] : {std::pair<Tensor, Tensor>{whole.dq, prefix.dq},
                             {whole.dk, prefix.dk},
                             {whole.dv, prefix.dv},
                             {whole.dgate, prefix.dgate},
                             {whole.dbeta, prefix.dbeta}}) {
      ASSERT_TRUE(same_bits(all.slice(0, n), part));
      ASSERT_TRUE(n == 130 || all_zero(all.slice(n, 130 - n)));
    }
    ASSERT_TRUE(same_bits(whole.d_initial_state, prefix.d_initial_state));
    ASSERT_TRUE(same_bits(whole.dA_log, prefix.dA_log));
    ASSERT_TRUE(same_bits(whole.ddt_bias, prefix.ddt_bias));
  }
}

// T1: only the last token's gate differs.
TEST(KdaCausality, ALaterGateChangesNothing) {
  KdaCase a({1, 22, 4, 32, 16}), b({1, 22, 4, 32, 16});
  set_token(a.gate, 21, -8.f);
  set_token(b.gate, 21, 20.f);
  a.run();
  b.run();
  EXPECT_TRUE(same_bits((*a.o).slice(0, 21), (*b.o).slice(0, 21)));
  EXPECT_FALSE(same_bits(a.o, b.o));
}

// T2: g = -5 everywhere, over eight chunks.
TEST(KdaGate, Saturated) {
  expect_like_recurrence({1, 512, 2, 32, 32}, [](KdaCase& c) { c.gate.normal(5, 0.5f, 20.f); });
}

// T3: the score of a token with itself has no decay in it, nor has the last token's write: exactly nothing reaches the
// gate when nothing else is there.
TEST(KdaGate, NoGradientWithoutDecay) {
  for (float gate : {0.f, 20.f, -8.f}) {
    for (int64_t only : {17, 63, 64, 79}) {
      SCOPED_TRACE(text("gate ", gate, " token ", only));
      KdaCase c({1, 80, 2, 16, 16});
      c.gate.normal(5, 1.f, gate);
      c.with_state = false;
      for (int64_t t = 0; t < 80; ++t) {
        if (t == only) continue;
        set_token(c.v, t, 0.f);
        set_token(c.d_o, t, 0.f);
      }
      if (only != 79) c.d_final_state.zero();
      c.run();
      EXPECT_TRUE(all_zero(c.dgate));
      EXPECT_TRUE(all_zero(c.dA_log));
      EXPECT_FALSE(all_zero(c.dq));
    }
  }
}

// T4: 13 saturated tokens, then 3 open ones, over and over; gradients of any size lose nothing.
TEST(KdaGate, SteepThenOpenAtEveryScale) {
  for (float scale : {1.f, 1e-4f, 1e-8f, 1e-10f, 1e4f, 1e6f}) {
    SCOPED_TRACE(text("scale ", scale));
    expect_like_recurrence({1, 160, 2, 32, 16}, [&](KdaCase& c) {
      for (int64_t t = 0; t < 160; ++t) set_token(c.gate, t, t % 16 < 13 ? 20.f : -3.f);
      c.A_log.zero();
      c.d_o.normal(9, scale);
      c.d_final_state.normal(10, scale);
    });
  }
}

// T5, T18: what the contract refuses.
TEST(KdaGate, BoundAndSizesAreChecked) {
  CpuStream s(1 << 24);
  KdaCase c({1, 4, 2, 8, 8});
  for (float bound : {-6.f, 0.f, 1.f}) {
    c.lower_bound = bound;
    EXPECT_THROW(kda_forward(s, c.d, c.inputs(), c.o, c.final_state, Tensor()), ContractError) << bound;
  }
  c.lower_bound = -5.9f;
  EXPECT_NO_THROW(kda_forward(s, c.d, c.inputs(), c.o, c.final_state, Tensor()));
  KdaInputs in = c.inputs();
  in.dt_bias = (*c.dt_bias).slice(0, 2);
  EXPECT_THROW(kda_forward(s, c.d, in, c.o, c.final_state, Tensor()), ContractError);
  in = c.inputs();
  in.initial_state = (*c.initial_state).slice(0, 1)[0].slice(0, 1);
  EXPECT_THROW(kda_forward(s, c.d, in, c.o, c.final_state, Tensor()), ContractError);
}

// T6: exp(100) is not a float; a gate saturated by it passes exactly no gradient, and nothing is NaN.
TEST(KdaGate, HugeALog) {
  for (std::optional<float> bound : {std::optional<float>(-5.f), std::optional<float>()}) {
    for (float shift : {0.f, 20.f}) {
      SCOPED_TRACE(text("bounded ", bound.has_value(), " shift ", shift));
      const auto prepare = [&](KdaCase& c) {
        c.lower_bound = bound;
        c.gate.normal(5, 1.f, shift);
        c.A_log[0] = c.A_log[1] = 100.f;
      };
      expect_like_recurrence({1, 70, 2, 16, 8}, prepare);
      KdaCase c({1, 70, 2, 16, 8});
      prepare(c);
      c.run();
      EXPECT_TRUE(all_zero(c.dgate));
      EXPECT_TRUE(all_zero(c.dA_log));
      EXPECT_FALSE(all_zero(c.dk));
    }
  }
}

// An unbounded gate far beyond e^-87 per token, between open ones: decays vanish, differences of logarithms would not.
TEST(KdaGate, SoftplusBeyondUnderflow) {
  expect_like_recurrence({1, 150, 2, 16, 16}, [](KdaCase& c) {
    c.lower_bound = std::nullopt;
    c.gate.normal(5, 1.f, -3.f);
    for (int64_t t : {3, 4, 20, 63, 64, 100}) set_token(c.gate, t, 500.f);
  });
}

// T8: identical keys with an open gate: the triangular system is as far from the identity as it gets.
TEST(KdaSolve, RepeatedTokens) {
  for (float beta : {0.f, 2.f, 20.f}) {
    SCOPED_TRACE(text("beta logit ", beta));
    expect_like_recurrence({1, 130, 2, 32, 32}, [&](KdaCase& c) {
      for (int64_t t = 0; t < 130; ++t) {
        set_token(c.beta, t, beta);
        for (int64_t i = 0; i < c.k->cols(); ++i) c.k[t * c.k->cols() + i] = c.k[i];
        for (int64_t i = 0; i < c.v->cols(); ++i) c.v[t * c.v->cols() + i] = c.v[i];
      }
      c.gate.normal(5, 0.1f, -8.f);
    });
  }
}

// T9: the state predicts 4098 where 4096 is due: the error is -2, to the last digit.
TEST(KdaSolve, SmallErrorOfLargeValues) {
  KdaCase c({1, 1, 1, 8, 8});
  c.k.zero();
  c.k[0] = 1e4f;  // normalised to exactly 1: the 1e-6 is lost beside 1e8
  set_token(c.gate, 0, -1000.f);
  set_token(c.v, 0, 4096.f);
  c.beta[0] = 0.f;
  c.initial_state.zero();
  c.d_o.zero();
  c.d_final_state.zero();
  for (int64_t j = 0; j < 8; ++j) {
    c.initial_state[j] = 4098.f;
    c.d_final_state[j] = 1.f;
  }
  c.run();
  for (int64_t j = 0; j < 8; ++j) EXPECT_EQ(c.final_state[j], 4097.f);  // 4098 + 1/2 (-2)
  EXPECT_EQ(c.dbeta[0], -4.f);                                          // 8 * (-2) * beta (1 - beta)
}

// T10: rows of zeros.  The norm's derivative there is 1 / sqrt(1e-6) = 1000.
TEST(KdaNorm, ZeroKeysAndQueries) {
  expect_like_recurrence({1, 40, 2, 16, 8}, [](KdaCase& c) {
    for (int64_t t : {0, 7, 16, 39}) {
      set_token(c.q, t, 0.f);
      set_token(c.k, t, 0.f);
    }
  });
  KdaCase c({1, 1, 1, 16, 8});
  c.q.zero();
  c.run();
  for (int64_t i = 0; i < 16; ++i) {
    double expected = 0;
    for (int64_t j = 0; j < 8; ++j) expected += double(c.final_state[i * 8 + j]) * c.d_o[j];
    expected *= 1000.0 / 4.0;                                           // K^(-1/2) = 1/4
    EXPECT_NEAR(c.dq[i], expected, 2e-6 * std::fabs(expected) + 1e-4);  // sums of 8 numbers around 250
  }
}

// T11: a gradient along the row itself is what is left of a cancellation: 1 - |y|^2 = 1e-6 / (|x|^2 + 1e-6).
TEST(KdaNorm, GradientAlongTheRow) {
  for (double norm : {1e-2, 1e-1}) {
    KdaCase c({1, 1, 1, 16, 1});
    c.initial_state.zero();
    double sum = 0;
    for (int64_t i = 0; i < 16; ++i) sum += double(c.q[i]) * c.q[i];
    for (int64_t i = 0; i < 16; ++i) {
      c.q[i] = static_cast<float>(c.q[i] * norm / std::sqrt(sum));
      c.initial_state[i] = c.q[i];  // so that dy = d_o S is along q
    }
    set_token(c.gate, 0, -1000.f);
    c.beta[0] = -1000.f;
    c.d_o[0] = 1.f;
    c.run();
    sum = 0;
    for (int64_t i = 0; i < 16; ++i) sum += double(c.q[i]) * c.q[i];
    const double r = 1 / std::sqrt(sum + 1e-6), remains = 1e-6 * r * r;
    for (int64_t i = 0; i < 16; ++i) {
      const double expected = 0.25 * r * c.q[i] * remains;
      // fp32 keeps 1 - |y|^2 to 1e-7: relative to it that is 1e-7 / remains, times a few.
      EXPECT_NEAR(c.dq[i], expected, 4e-7 / remains * std::fabs(expected)) << norm;
    }
  }
}

}  // namespace
