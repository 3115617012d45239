// KDA forward + backward, chunked against token by token, on one core.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
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

// Milliseconds of processor time: preemption by other work on the machine does not count.
template <class F>
double milliseconds(F&& fn) {
  const std::clock_t t0 = std::clock();
  fn();
  return 1e3 * static_cast<double>(std::clock() - t0) / CLOCKS_PER_SEC;
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
  // Best of the runs, the forms taking turns: a busy neighbour slows both alike.
  double cf = 1e30, cb = 1e30, rf = 1e30, rb = 1e30;
  for (int run = 0; run < runs; ++run) {
    cf = std::min(cf, milliseconds([&] { kda_forward(s, d, in, to, ts, tsaved); }));
    cb = std::min(cb, milliseconds([&] { kda_backward(s, d, in, tsaved, td, tds, g); }));
    rf = std::min(rf, milliseconds([&] { cpu::kda_recurrence_forward(d, in, to, ts); }));
    rb = std::min(rb, milliseconds([&] { cpu::kda_recurrence_backward(d, in, td, tds, g); }));
  }
  std::printf("B=%d T=%d H=%d K=%d V=%d %-8s  chunked %7.2f + %7.2f ms  token by token %7.2f + %7.2f ms  ratio %.2f\n",
              int(d.B), int(d.T), int(d.H), int(d.K), int(d.V), bound ? "bounded" : "softplus", cf, cb, rf, rb,
              (rf + rb) / (cf + cb));
}

}  // namespace

int main(int argc, char** argv) {
  omp_set_num_threads(1);
  const int runs = argc > 1 ? std::atoi(argv[1]) : 20;
  measure({1, 2048, 4, 64, 64}, -5.f, runs);
  measure({1, 2048, 4, 64, 64}, std::nullopt, runs);
  measure({1, 2048, 2, 128, 128}, -5.f, runs);
  measure({1, 1, 4, 64, 64}, -5.f, runs);
}
