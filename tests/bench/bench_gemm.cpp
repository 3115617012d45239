// Speed of the CPU products: GFLOP/s of every product this program has, over the shapes that training meets.
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "kernels/core/parallel.h"
#include "kernels/gemm/own_gemm.h"

using namespace kestrel;

namespace {

struct Shape {
  int64_t M, N, K;
};

std::vector<float> normal(int64_t n) {
  std::mt19937 rng(1);
  std::normal_distribution<float> d;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& e : x) e = d(rng);
  return x;
}

// The best of several runs of at least 20 ms each: other programs can only slow a run down.
double gflops(const Shape& n, const std::function<void()>& product) {
  using Clock = std::chrono::steady_clock;
  const double work = 2.0 * static_cast<double>(n.M) * static_cast<double>(n.N) * static_cast<double>(n.K);
  double best = 0;
  for (int run = 0; run < 6; ++run) {
    int64_t calls = 0;
    double seconds = 0;
    const auto start = Clock::now();
    do {
      product();
      ++calls;
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    } while (seconds < 0.02);
    best = std::max(best, work * static_cast<double>(calls) / seconds * 1e-9);
  }
  return best;
}

void row(const Shape& n, Trans ta, Trans tb) {
  const auto a = normal(n.M * n.K), b = normal(n.K * n.N);
  std::vector<float> c(static_cast<size_t>(n.M * n.N));
  const int64_t lda = ta == Trans::no ? n.K : n.M, ldb = tb == Trans::no ? n.N : n.K;
  const cpu::Product p{ta, tb, n.M, n.N, n.K, 1.f, a.data(), lda, b.data(), ldb, 0.f, c.data(), n.N};
  std::printf("| %s%s | %5ld %5ld %5ld |", ta == Trans::no ? "N" : "T", tb == Trans::no ? "N" : "T", long(n.M),
              long(n.N), long(n.K));
  for (const CpuGemm g : {CpuGemm::openblas, CpuGemm::own}) {
    if (g == CpuGemm::openblas && !has_openblas()) continue;
    set_cpu_gemm(g);
    std::printf(" %7.1f |",
                gflops(n, [&] { cpu::sgemm(ta, tb, n.M, n.N, n.K, 1.f, p.A, lda, p.B, ldb, 0.f, c.data(), n.N); }));
  }
  std::printf(" %7.1f |", gflops(n, [&] { cpu::own_parallel(cpu::base_kernels(), p); }));
  std::printf(" %7.1f |\n", gflops(n, [&] {
                cpu::sgemm_serial(ta, tb, n.M, n.N, n.K, 1.f, p.A, lda, p.B, ldb, 0.f, c.data(), n.N);
              }));
  std::fflush(stdout);
}

}  // namespace

int main() {
  std::printf("GFLOP/s, %d threads\n\n| op | M N K |", omp_get_max_threads());
  if (has_openblas()) {
    set_cpu_gemm(CpuGemm::openblas);
    std::printf(" %s |", cpu_gemm_description().c_str());
  }
  set_cpu_gemm(CpuGemm::own);
  std::printf(" %s | own %s GEMM | %s, one thread |\n|---|---|---|---|---|%s\n", cpu_gemm_description().c_str(),
              cpu::base_kernels().name, cpu_gemm_description().c_str(), has_openblas() ? "---|" : "");
  const Trans no = Trans::no, yes = Trans::yes;
  for (const auto& [ta, tb] : {std::pair{no, yes}, std::pair{no, no}, std::pair{yes, no}}) {
    for (const Shape& n : {Shape{512, 512, 512}, Shape{1024, 1024, 1024}, Shape{2048, 256, 1024},
                           Shape{256, 1024, 2048}, Shape{2048, 256, 256}}) {
      row(n, ta, tb);
    }
    for (const Shape& n : {Shape{16, 16, 16}, Shape{64, 64, 16}, Shape{64, 64, 64}, Shape{16, 128, 128},
                           Shape{1, 1024, 1024}, Shape{4, 1024, 1024}}) {
      row(n, ta, tb);
    }
  }
}
