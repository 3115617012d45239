// The arithmetic is compiled once per instruction set and the best is taken: the others must be right too.
#include <array>

#include "kernels/kda/kda_cpu.h"
#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

KdaCase& run_with(KdaCase& c, const cpu::kda::ChainForms& forms) {
  Buffer saved({kda_saved_elements(c.d)}), scratch({cpu::kda_forward_scratch(c.d)}),
      backward_scratch({cpu::kda_backward_scratch(c.d)});
  c.dA_log.zero();
  c.ddt_bias.zero();
  cpu::kda_forward(c.d, c.inputs(), c.o, c.final_state, saved, scratch->f32(), forms);
  cpu::kda_backward(c.d, c.inputs(), saved, c.d_o, c.d_final_state, c.grads(), backward_scratch->f32(), forms);
  return c;
}

// The limits of test_kda_forms.cpp: the same terms, summed in another order.
void expect_like_recurrence(const KdaDims& d, std::optional<float> bound, const cpu::kda::ChainForms& forms) {
  KdaCase a(d), b(d);
  a.lower_bound = b.lower_bound = bound;
  run_with(a, forms);
  b.run(Form::recurrence);
  const auto oa = a.outputs(), ob = b.outputs(), ga = a.gradients(), gb = b.gradients();
  for (size_t i = 0; i < oa.size(); ++i) EXPECT_LE(relative_error(oa[i].second, ob[i].second), 5e-6) << oa[i].first;
  for (size_t i = 0; i < ga.size(); ++i) EXPECT_LE(relative_error(ga[i].second, gb[i].second), 5e-5) << ga[i].first;
}

class KdaInstructionSets : public testing::TestWithParam<const char*> {};

TEST_P(KdaInstructionSets, AgreeWithRecurrence) {
  const bool base = std::string(GetParam()) == "base";
  const cpu::kda::ChainForms forms = base ? cpu::kda::chain_forms_base() : cpu::kda::chain_forms_avx512();
  if (forms.forward == nullptr) GTEST_SKIP() << "no AVX-512 on this machine";
  for (std::optional<float> bound : {std::optional<float>(-5.f), std::optional<float>()}) {
    for (auto [T, K, V] : {std::array<int64_t, 3>{1, 5, 3}, {83, 64, 64}, {70, 24, 40}, {150, 16, 33}, {40, 128, 96}}) {
      SCOPED_TRACE(text("T ", T, " K ", K, " V ", V, " bounded ", bound.has_value()));
      expect_like_recurrence({1, T, 2, K, V}, bound, forms);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kda, KdaInstructionSets, testing::Values("base", "avx512"),
                         [](const auto& set) { return std::string(set.param); });

}  // namespace
