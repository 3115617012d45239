// The float64 golden fixtures: both forms, outputs and every gradient.
#include "tests/kernels/kda/kda_case.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

// Float32 round-off through up to 150 dependent tokens stays below these (the house's limits for golden fixtures).
constexpr double kOutputs = 1e-5, kGradients = 1e-4;

std::string name_of_case(const testing::TestParamInfo<const char*>& info) {
  return info.param;
}

KdaDims dims_of(const SafetensorsFile& f) {
  const auto &q = f.entry("q").shape, &v = f.entry("v").shape;
  return {q[0], q[1], q[2], q[3], v[3]};
}

class KdaFixture : public testing::TestWithParam<const char*> {
 protected:
  void check(Form form) {
    const SafetensorsFile f = fixture(GetParam());
    KdaCase c(dims_of(f));
    c.lower_bound = std::string(GetParam()) == "kda_softplus" ? std::optional<float>() : std::optional<float>(-5.f);
    c.with_state = f.has("state");
    c.with_documents = f.has("segment");
    for (auto [name, t] : {std::pair<const char*, Tensor>{"q", c.q},
                           {"k", c.k},
                           {"v", c.v},
                           {"gate", c.gate},
                           {"beta", c.beta},
                           {"A_log", c.A_log},
                           {"dt_bias", c.dt_bias},
                           {"d_o", c.d_o},
                           {"d_final_state", c.d_final_state}}) {
      copy_values(t, f.tensor(name));
    }
    if (c.with_state) copy_values(c.initial_state, f.tensor("state"));
    if (c.with_documents) {
      CpuStream s(1 << 20);
      document_starts(s, c.document_start, f.tensor("segment"));
    }
    c.run(form);
    for (auto [name, t] : c.outputs()) EXPECT_LE(relative_error(t, flat(f, name, t)), kOutputs) << name;
    const char* in_file[] = {"d_q", "d_k", "d_v", "d_gate", "d_beta", "d_A_log", "d_dt_bias", "d_state"};
    size_t i = 0;
    for (auto [name, t] : c.gradients()) {
      const char* there = in_file[i++];
      if (f.has(there)) {
        EXPECT_LE(relative_error(t, flat(f, there, t)), kGradients) << name;
      }
    }
  }
  static Tensor flat(const SafetensorsFile& f, const char* name, const Tensor& like) {
    return f.tensor(name).view({like.rows(), like.cols()});
  }
};

TEST_P(KdaFixture, Chunked) {
  check(Form::chunked);
}
TEST_P(KdaFixture, Recurrence) {
  check(Form::recurrence);
}

INSTANTIATE_TEST_SUITE_P(All, KdaFixture,
                         testing::Values("kda_small", "kda_tail1", "kda_128", "kda_saturated", "kda_open", "kda_repeat",
                                         "kda_correlated", "kda_tiny", "kda_T1", "kda_T15", "kda_T64", "kda_T128",
                                         "kda_softplus", "kda_packed", "kda_packed_state"),
                         name_of_case);

}  // namespace
