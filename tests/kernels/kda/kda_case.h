// A KDA problem with all its inputs and outputs, run through either form.
#pragma once

#include <functional>

#include "kernels/core/elementwise.h"
#include "kernels/kda/kda.h"
#include "tests/support.h"

namespace kestrel::test {

enum class Form { chunked, recurrence };

// Owned tensors, contiguous.  The constructor fills inputs with N(0,1) (gates, biases and A_log as fixtures have them).
struct KdaCase {
  KdaDims d;
  Buffer q, k, v, gate, beta, A_log, dt_bias, initial_state, document_start;
  Buffer o, final_state, d_o, d_final_state;
  Buffer dq, dk, dv, dgate, dbeta, dA_log, ddt_bias, d_initial_state;
  std::optional<float> lower_bound = -5.f;
  bool with_state = true, with_documents = false;

  explicit KdaCase(const KdaDims& dims, uint64_t seed = 1)
      : d(dims),
        q({d.B * d.T, d.H * d.K}),
        k({d.B * d.T, d.H * d.K}),
        v({d.B * d.T, d.H * d.V}),
        gate({d.B * d.T, d.H * d.K}),
        beta({d.B * d.T, d.H}),
        A_log({d.H}),
        dt_bias({d.H * d.K}),
        initial_state({d.B, d.H, d.K, d.V}),
        document_start({d.B, d.T}, DType::i32),
        o({d.B * d.T, d.H * d.V}),
        final_state({d.B, d.H, d.K, d.V}),
        d_o({d.B * d.T, d.H * d.V}),
        d_final_state({d.B, d.H, d.K, d.V}),
        dq({d.B * d.T, d.H * d.K}),
        dk({d.B * d.T, d.H * d.K}),
        dv({d.B * d.T, d.H * d.V}),
        dgate({d.B * d.T, d.H * d.K}),
        dbeta({d.B * d.T, d.H}),
        dA_log({d.H}),
        ddt_bias({d.H * d.K}),
        d_initial_state({d.B, d.H, d.K, d.V}) {
    q.normal(seed * 100 + 1);
    k.normal(seed * 100 + 2);
    v.normal(seed * 100 + 3);
    gate.normal(seed * 100 + 4);
    beta.normal(seed * 100 + 5);
    A_log.normal(seed * 100 + 6, 0.3f, 0.5f);
    dt_bias.normal(seed * 100 + 7, 0.5f);
    initial_state.normal(seed * 100 + 8, 0.5f);
    d_o.normal(seed * 100 + 9);
    d_final_state.normal(seed * 100 + 10);
  }

  // Documents of the given lengths, row after row (they must fill B rows of T).
  void documents(const std::vector<int64_t>& lengths) {
    with_documents = true;
    int64_t i = 0;
    for (int64_t n : lengths) {
      const int64_t start = i % d.T;
      for (int64_t j = 0; j < n; ++j) document_start->i32()[i++] = static_cast<int32_t>(start);
    }
    ASSERT_EQ(i, d.B * d.T);
  }

  KdaInputs inputs() const {
    return {q,
            k,
            v,
            gate,
            beta,
            A_log,
            dt_bias,
            lower_bound,
            with_state ? *initial_state : Tensor(),
            with_documents ? *document_start : Tensor()};
  }
  KdaGrads grads() const { return {dq, dk, dv, dgate, dbeta, dA_log, ddt_bias, d_initial_state}; }

  KdaCase& run(Form form = Form::chunked) {
    dA_log.zero();
    ddt_bias.zero();
    if (form == Form::recurrence) {
      cpu::kda_recurrence_forward(d, inputs(), o, final_state);
      cpu::kda_recurrence_backward(d, inputs(), d_o, d_final_state, grads());
      return *this;
    }
    Buffer saved({kda_saved_elements(d)});
    const auto both = [&](Stream& s) {
      kda_forward(s, d, inputs(), o, final_state, saved);
      kda_backward(s, d, inputs(), saved, d_o, d_final_state, grads());
    };
    Arena plan = Arena::planner(Device::cpu);
    Stream planning(plan);
    both(planning);
    CpuStream s(plan.peak());  // scratch of the planned size and no more, full of NaN
    {
      ScratchScope all(s);
      std::memset((*s).temp({plan.peak() / 4}).data, 0xff, static_cast<size_t>(plan.peak()));
    }
    both(s);
    return *this;
  }

  std::vector<std::pair<const char*, Tensor>> outputs() const { return {{"o", o}, {"final_state", final_state}}; }
  std::vector<std::pair<const char*, Tensor>> gradients() const {
    return {{"dq", dq},
            {"dk", dk},
            {"dv", dv},
            {"dgate", dgate},
            {"dbeta", dbeta},
            {"dA_log", dA_log},
            {"ddt_bias", ddt_bias},
            {"d_initial_state", d_initial_state}};
  }
};

inline void copy_values(const Tensor& to, const Tensor& from) {
  ASSERT_EQ(to.bytes(), from.bytes());
  std::memcpy(to.data, from.data, static_cast<size_t>(to.bytes()));
}

// Rows [begin, begin + n) of one case as another (B = 1), inputs and output gradients.
inline void copy_rows(const KdaCase& from, int64_t begin, KdaCase& to) {
  const auto rows = [&](const Tensor& a, const Tensor& b) { copy_values(b, a.slice(begin, to.d.T)); };
  rows(from.q, to.q);
  rows(from.k, to.k);
  rows(from.v, to.v);
  rows(from.gate, to.gate);
  rows(from.beta, to.beta);
  rows(from.d_o, to.d_o);
  copy_values(to.A_log, from.A_log);
  copy_values(to.dt_bias, from.dt_bias);
  to.lower_bound = from.lower_bound;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.bytes(), b.bytes());
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

inline bool all_finite(const Tensor& t) {
  for (int64_t i = 0; i < t.numel(); ++i) {
    if (!std::isfinite(t.f32()[i])) return false;
  }
  return true;
}

}  // namespace kestrel::test
