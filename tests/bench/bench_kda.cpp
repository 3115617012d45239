// KDA forward + backward, chunked against token by token, on one core.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/kda/kda.h"

using namespace kestrel;

namespace {

struct Normal {
  std::vector<float> x;
  Normal(int64_t n, uint64_t seed, float std = 1.f) : x(static_cast<size_t>(n)) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> d(0.f, std);
    for (float& v : x) v = d(rng);
  }
  Tensor as(std::initializer_list<int64_t> shape) { return Tensor::of(x.data(), shape); }
};

// The best of `runs` runs, in milliseconds: other work on the machine only ever adds time.
template <class F>
double best_ms(int runs, F&& fn) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto t0 = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double, std::milli> t = std::chrono::steady_clock::now() - t0;
    best = std::min(best, t.count());
  }
  return best;
}

void measure(const KdaDims& d, std::optional<float> bound, int runs) {
  const int64_t rows = d.B * d.T, k = d.H * d.K, v = d.H * d.V;
  Normal q(rows * k, 1), kk(rows * k, 2), vv(rows * v, 3), gate(rows * k, 4), beta(rows * d.H, 5), A_log(d.H, 6, 0.1f),
      bias(k, 7, 0.5f), d_o(rows * v, 8), d_state(d.B * k * d.V, 9);
  Normal o(rows * v, 0), state(d.B * k * d.V, 0), saved(std::max<int64_t>(kda_saved_elements(d), 1), 0);
  Normal dq(rows * k, 0), dk(rows * k, 0), dv(rows * v, 0), dgate(rows * k, 0), dbeta(rows * d.H, 0), dA(d.H, 0),
      dbias(k, 0);
  const Tensor none;
  const KdaInputs in{q.as({rows, k}),
                     kk.as({rows, k}),
                     vv.as({rows, v}),
                     gate.as({rows, k}),
                     beta.as({rows, d.H}),
                     A_log.as({d.H}),
                     bias.as({k}),
                     bound,
                     none,
                     none};
  const KdaGrads g{dq.as({rows, k}),      dk.as({rows, k}), dv.as({rows, v}), dgate.as({rows, k}),
                   dbeta.as({rows, d.H}), dA.as({d.H}),     dbias.as({k}),    none};
  const Tensor to = o.as({rows, v}), ts = state.as({d.B, d.H, d.K, d.V}), td = d_o.as({rows, v}),
               tds = d_state.as({d.B, d.H, d.K, d.V}), tsaved = saved.as({kda_saved_elements(d)});
  Arena arena(Device::cpu, int64_t{1} << 30);
  Stream s(arena);
  const double cf = best_ms(runs, [&] { kda_forward(s, d, in, to, ts, tsaved); });
  const double cb = best_ms(runs, [&] { kda_backward(s, d, in, tsaved, td, tds, g); });
  const double rf = best_ms(runs, [&] { cpu::kda_recurrence_forward(d, in, to, ts); });
  const double rb = best_ms(runs, [&] { cpu::kda_recurrence_backward(d, in, td, tds, g); });
  std::printf("B=%d T=%d H=%d K=%d V=%d %-8s  chunked %7.2f + %7.2f ms  token by token %7.2f + %7.2f ms  ratio %.2f\n",
              int(d.B), int(d.T), int(d.H), int(d.K), int(d.V), bound ? "bounded" : "softplus", cf, cb, rf, rb,
              (rf + rb) / (cf + cb));
}

}  // namespace

int main(int argc, char** argv) {
  omp_set_num_threads(1);
  const int runs = argc > 1 ? std::atoi(argv[1]) : 5;
  measure({1, 2048, 4, 64, 64}, -5.f, runs);
  measure({1, 2048, 4, 64, 64}, std::nullopt, runs);
  measure({1, 2048, 2, 128, 128}, -5.f, runs);
  measure({1, 1, 4, 64, 64}, -5.f, runs);
}
