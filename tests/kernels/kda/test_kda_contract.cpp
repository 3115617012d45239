// The rest of the contract: views, empty tensors, what is overwritten and what is added to, repeatability.
#include <omp.h>

#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

void expect_same_bits(const KdaCase& a, const KdaCase& b) {
  const auto oa = a.outputs(), ob = b.outputs(), ga = a.gradients(), gb = b.gradients();
  for (size_t i = 0; i < oa.size(); ++i) EXPECT_TRUE(same_bits(oa[i].second, ob[i].second)) << oa[i].first;
  for (size_t i = 0; i < ga.size(); ++i) EXPECT_TRUE(same_bits(ga[i].second, gb[i].second)) << ga[i].first;
}

// T20.  70 chains: more than there are workers.
TEST(KdaContract, SameBitsEveryRunAndForEveryThreadCount) {
  const KdaDims d{14, 70, 5, 16, 8};
  KdaCase a(d), b(d), c(d);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  a.run();
  b.run();
  omp_set_num_threads(2);
  c.run();
  omp_set_num_threads(threads);
  expect_same_bits(a, b);
  expect_same_bits(a, c);
}

// T22.
TEST(KdaContract, InputsStayAsTheyAre) {
  KdaCase before({2, 70, 2, 16, 8}), after({2, 70, 2, 16, 8});
  before.documents({30, 40, 70});
  after.documents({30, 40, 70});
  after.run();
  for (auto [x, y] : {std::pair<Tensor, Tensor>{before.q, after.q},
                      {before.k, after.k},
                      {before.v, after.v},
                      {before.gate, after.gate},
                      {before.beta, after.beta},
                      {before.A_log, after.A_log},
                      {before.dt_bias, after.dt_bias},
                      {before.initial_state, after.initial_state},
                      {before.document_start, after.document_start},
                      {before.d_o, after.d_o},
                      {before.d_final_state, after.d_final_state}}) {
    EXPECT_TRUE(same_bits(x, y));
  }
}

// A tensor as columns [3, 3 + cols) of a wider one.
struct Wide {
  Buffer memory;
  Tensor view;
  explicit Wide(const Tensor& like, bool copy)
      : memory({like.rows(), like.cols() + 7}), view((*memory).columns(3, like.cols())) {
    if (!copy) return;
    for (int64_t r = 0; r < like.rows(); ++r) {
      std::memcpy(view.f32() + r * view.ld, like.f32() + r * like.ld, size_t(like.cols()) * 4);
    }
  }
  void expect(const Tensor& like, const char* name) const {
    for (int64_t r = 0; r < like.rows(); ++r) {
      EXPECT_EQ(0, std::memcmp(view.f32() + r * view.ld, like.f32() + r * like.ld, size_t(like.cols()) * 4)) << name;
      for (int64_t c : {int64_t{0}, int64_t{2}, like.cols() + 3, like.cols() + 6}) {
        EXPECT_TRUE(std::isnan(memory[r * (like.cols() + 7) + c])) << name << " wrote beside its columns";
      }
    }
  }
};

// T15: column blocks are honoured.
TEST(KdaContract, ColumnBlocks) {
  KdaCase c({2, 70, 2, 16, 24});
  c.run();
  Wide q(c.q, true), k(c.k, true), v(c.v, true), gate(c.gate, true), beta(c.beta, true), d_o(c.d_o, true);
  Wide o(c.o, false), dq(c.dq, false), dk(c.dk, false), dv(c.dv, false), dgate(c.dgate, false), dbeta(c.dbeta, false);
  KdaInputs in = c.inputs();
  in.q = q.view, in.k = k.view, in.v = v.view, in.gate = gate.view, in.beta = beta.view;
  Buffer dA_log({2}), ddt_bias({32}), saved({kda_saved_elements(c.d)});
  dA_log.zero();
  ddt_bias.zero();
  CpuStream s(1 << 26);
  kda_forward(s, c.d, in, o.view, Tensor(), saved);
  kda_backward(s, c.d, in, saved, d_o.view, c.d_final_state,
               {dq.view, dk.view, dv.view, dgate.view, dbeta.view, dA_log, ddt_bias, Tensor()});
  o.expect(c.o, "o");
  dq.expect(c.dq, "dq");
  dk.expect(c.dk, "dk");
  dv.expect(c.dv, "dv");
  dgate.expect(c.dgate, "dgate");
  dbeta.expect(c.dbeta, "dbeta");
}

// Empty states and an empty `saved` mean zero, not wanted and inference.
TEST(KdaContract, EmptyTensors) {
  KdaCase zero({1, 70, 2, 16, 8}), none({1, 70, 2, 16, 8});
  zero.initial_state.zero();
  zero.d_final_state.zero();
  zero.run();
  none.with_state = false;
  none.dA_log.zero();
  none.ddt_bias.zero();
  CpuStream s(1 << 26);
  Buffer saved({kda_saved_elements(none.d)}), o({70, 16});
  kda_forward(s, none.d, none.inputs(), o, Tensor(), Tensor());
  EXPECT_TRUE(same_bits(o, zero.o));
  kda_forward(s, none.d, none.inputs(), none.o, none.final_state, saved);
  kda_backward(s, none.d, none.inputs(), saved, none.d_o, Tensor(), none.grads());
  expect_same_bits(zero, none);
}

// A state every 64 tokens, and V + 32 numbers per token.
TEST(KdaContract, SavedSize) {
  EXPECT_EQ(kda_saved_elements({2, 64, 3, 16, 8}), 2 * 3 * 64 * 40);
  EXPECT_EQ(kda_saved_elements({2, 65, 3, 16, 8}), 2 * 3 * (16 * 8 + 65 * 40));
  EXPECT_EQ(kda_saved_elements({1, 2048, 1, 128, 128}), 31 * 128 * 128 + 2048 * 160);
  KdaCase c({1, 200, 1, 8, 8});
  CpuStream s(1 << 24);
  Buffer small({kda_saved_elements(c.d) - 1});
  EXPECT_THROW(kda_forward(s, c.d, c.inputs(), c.o, c.final_state, small), ContractError);
  EXPECT_THROW(kda_backward(s, c.d, c.inputs(), Tensor(), c.d_o, c.d_final_state, c.grads()), ContractError);
}

TEST(KdaContract, ParameterGradientsAreAddedTo) {
  KdaCase c({2, 70, 2, 16, 8});
  c.run();
  Buffer A({2}), bias({32});
  A.copy(c.dA_log);
  bias.copy(c.ddt_bias);
  CpuStream s(1 << 26);
  Buffer saved({kda_saved_elements(c.d)});
  kda_forward(s, c.d, c.inputs(), c.o, c.final_state, saved);
  kda_backward(s, c.d, c.inputs(), saved, c.d_o, c.d_final_state, c.grads());
  // Two equal addends per row of the batch: doubled to rounding.
  for (int64_t i = 0; i < 2; ++i) EXPECT_NEAR(c.dA_log[i], 2 * A[i], 1e-5 * std::fabs(A[i]) + 1e-6);
  for (int64_t i = 0; i < 32; ++i) EXPECT_NEAR(c.ddt_bias[i], 2 * bias[i], 1e-5 * std::fabs(bias[i]) + 1e-5);
}

// A planning run counts the scratch, which does not depend on the threads, and touches nothing.
TEST(KdaContract, Planning) {
  KdaCase c({2, 100, 2, 16, 8});
  const auto scratch = [&](int threads) {
    omp_set_num_threads(threads);
    Arena plan = Arena::planner(Device::cpu);
    Stream s(plan);
    const auto t = [&](std::initializer_list<int64_t> shape) { return plan.keep(shape, DType::f32, "test"); };
    KdaInputs in{t({200, 32}), t({200, 32}), t({200, 16}), t({200, 32}), t({200, 2}),
                 t({2}),       t({32}),      -5.f,         Tensor(),     Tensor()};
    kda_forward(s, c.d, in, t({200, 16}), Tensor(), t({kda_saved_elements(c.d)}));
    kda_backward(s, c.d, in, t({kda_saved_elements(c.d)}), t({200, 16}), Tensor(),
                 {t({200, 32}), t({200, 32}), t({200, 16}), t({200, 32}), t({200, 2}), t({2}), t({32}), Tensor()});
    EXPECT_EQ(plan.temp_mark(), plan.capacity());
    return plan.by_purpose().at("scratch");
  };
  const int threads = omp_get_max_threads();
  const int64_t one = scratch(1), two = scratch(2);
  omp_set_num_threads(threads);
  EXPECT_EQ(one, two);
  EXPECT_GT(one, 0);
}

}  // namespace
