// The chunked form against the definition, token by token, over lengths, gates, documents and sizes; and the two cut
// and put together in different ways.
#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

// Both forms are fp32 and sum the same terms in another order: sqrt(64 terms) * 6e-8 per number, a few times that where
// errors pass on from token to token.
constexpr double kOutputs = 5e-6, kGradients = 5e-5;

enum class Shape { normal, saturated, open, softplus };

void set_gate(KdaCase& c, Shape shape) {
  if (shape == Shape::saturated) c.gate.normal(77, 1.f, 20.f);
  if (shape == Shape::open) c.gate.normal(78, 1.f, -8.f);
  if (shape == Shape::softplus) c.lower_bound = std::nullopt;
}

void expect_forms_agree(const KdaCase& a, const KdaCase& b, double outputs = kOutputs, double gradients = kGradients) {
  const auto oa = a.outputs(), ob = b.outputs(), ga = a.gradients(), gb = b.gradients();
  for (size_t i = 0; i < oa.size(); ++i) {
    EXPECT_LE(relative_error(oa[i].second, ob[i].second), outputs) << oa[i].first;
  }
  for (size_t i = 0; i < ga.size(); ++i) {
    EXPECT_LE(relative_error(ga[i].second, gb[i].second), gradients) << ga[i].first;
  }
}

template <class F>
void expect_forms_agree_on(const KdaDims& d, F&& prepare, double outputs = kOutputs, double gradients = kGradients) {
  KdaCase a(d), b(d);
  prepare(a);
  prepare(b);
  expect_forms_agree(a.run(Form::chunked), b.run(Form::recurrence), outputs, gradients);
}

// T12: tails of every kind, the state that leaves among the outputs; every tensor lies in poisoned memory.
TEST(KdaForms, AgreeOnLengthsAndGates) {
  for (int64_t T : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 129, 200}) {
    for (Shape shape : {Shape::normal, Shape::saturated, Shape::open, Shape::softplus}) {
      SCOPED_TRACE(text("T ", T, " gate ", static_cast<int>(shape)));
      expect_forms_agree_on({2, T, 2, 24, 16}, [&](KdaCase& c) { set_gate(c, shape); });
    }
  }
}

TEST(KdaForms, AgreeOnHeadSizes) {
  for (auto [K, V] : {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {16, 16}, {24, 40}, {32, 64}, {64, 33}, {128, 128}}) {
    SCOPED_TRACE(text("K ", K, " V ", V));
    expect_forms_agree_on({1, 83, 3, K, V}, [](KdaCase&) {});
  }
}

// T13: documents of many lengths, borders at every position inside tiles and chunks, and documents of one token.
TEST(KdaForms, AgreeOnDocuments) {
  const std::vector<int64_t> lengths = {1,   15, 16, 17, 63, 64, 65, 1, 1, 3, 129, 25,  // 400
                                        200, 1,  64, 64, 7,  64};                       // 400
  for (Shape shape : {Shape::normal, Shape::open, Shape::softplus}) {
    for (bool state : {false, true}) {
      SCOPED_TRACE(text("gate ", static_cast<int>(shape), " state ", state));
      expect_forms_agree_on({2, 400, 2, 16, 24}, [&](KdaCase& c) {
        set_gate(c, shape);
        c.with_state = state;
        c.documents(lengths);
      });
    }
  }
}

TEST(KdaForms, AgreeOnManyDocuments) {
  std::vector<int64_t> lengths;
  int64_t T = 0;
  for (int i = 0; i < 127; ++i) {
    lengths.push_back(16 << (i % 3));
    T += lengths.back();
  }
  expect_forms_agree_on({1, T, 1, 8, 8}, [&](KdaCase& c) { c.documents(lengths); });
}

TEST(KdaForms, AgreeWhenEveryTokenIsADocument) {
  expect_forms_agree_on({1, 70, 2, 16, 8}, [&](KdaCase& c) { c.documents(std::vector<int64_t>(70, 1)); });
}

// T14: a document's rows do not know where in the batch they lie, nor what lies around them.
TEST(KdaForms, PackedEqualsAloneBitForBit) {
  const std::vector<int64_t> lengths = {70, 1, 129, 64, 16, 33};
  KdaCase packed({1, 313, 2, 24, 16});
  packed.documents(lengths);
  packed.run();
  int64_t begin = 0;
  for (int64_t n : lengths) {
    SCOPED_TRACE(text("document of ", n, " tokens at ", begin));
    KdaCase alone({1, n, 2, 24, 16});
    copy_rows(packed, begin, alone);
    if (begin > 0) alone.initial_state.zero();
    if (begin + n < packed.d.T) alone.d_final_state.zero();
    alone.run();
    const auto rows = [&](const Tensor& t) { return t.slice(begin, n); };
    EXPECT_TRUE(same_bits(rows(packed.o), alone.o));
    EXPECT_TRUE(same_bits(rows(packed.dq), alone.dq));
    EXPECT_TRUE(same_bits(rows(packed.dk), alone.dk));
    EXPECT_TRUE(same_bits(rows(packed.dv), alone.dv));
    EXPECT_TRUE(same_bits(rows(packed.dgate), alone.dgate));
    EXPECT_TRUE(same_bits(rows(packed.dbeta), alone.dbeta));
    if (begin == 0) {
      EXPECT_TRUE(same_bits(packed.d_initial_state, alone.d_initial_state));
    }
    begin += n;
    if (begin == packed.d.T) {
      EXPECT_TRUE(same_bits(packed.final_state, alone.final_state));
    }
  }
}

// T16: the state handed on is the state kept inside.  Cut where chunks meet the bits are the same; elsewhere the chunks
// differ, and so does the round-off.
TEST(KdaForms, TwoCallsEqualOne) {
  for (int64_t cut : {64, 128, 50, 1}) {
    SCOPED_TRACE(text("cut at ", cut));
    KdaCase whole({1, 150, 2, 24, 16}), first({1, cut, 2, 24, 16}), second({1, 150 - cut, 2, 24, 16});
    whole.run();
    copy_rows(whole, 0, first);
    copy_rows(whole, cut, second);
    copy_values(first.initial_state, whole.initial_state);
    first.run();  // for its final state; its gradients need those of the second part
    copy_values(second.initial_state, first.final_state);
    copy_values(second.d_final_state, whole.d_final_state);
    second.run();
    copy_values(first.d_final_state, second.d_initial_state);
    first.run();
    const double outputs = cut % 64 == 0 ? 0 : kOutputs, gradients = cut % 64 == 0 ? 0 : kGradients;
    const auto check = [&](const Buffer& all, const Buffer& a, const Buffer& b, double limit, const char* name) {
      EXPECT_LE(relative_error(a, (*all).slice(0, cut)), limit) << name << ", first part";
      EXPECT_LE(relative_error(b, (*all).slice(cut, 150 - cut)), limit) << name << ", second part";
    };
    check(whole.o, first.o, second.o, outputs, "o");
    check(whole.dq, first.dq, second.dq, gradients, "dq");
    check(whole.dk, first.dk, second.dk, gradients, "dk");
    check(whole.dv, first.dv, second.dv, gradients, "dv");
    check(whole.dgate, first.dgate, second.dgate, gradients, "dgate");
    check(whole.dbeta, first.dbeta, second.dbeta, gradients, "dbeta");
    EXPECT_LE(relative_error(second.final_state, whole.final_state), outputs);
    EXPECT_LE(relative_error(first.d_initial_state, whole.d_initial_state), gradients);
  }
}

}  // namespace
