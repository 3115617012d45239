#include <algorithm>
#include <atomic>

#include "kernels/core/parallel.h"
#include "kernels/gemm/openblas.h"
#include "kernels/gemm/own_gemm.h"

namespace kestrel {
namespace {

// OpenBLAS where it was built in, except on machines with AVX-512: there the own product is the faster one (README).
CpuGemm default_gemm() { return has_openblas() && !cpu::avx512_kernels() ? CpuGemm::openblas : CpuGemm::own; }

std::atomic<CpuGemm>& chosen() {
  static std::atomic<CpuGemm> g{default_gemm()};
  return g;
}

}  // namespace

bool has_openblas() {
#ifdef KESTREL_HAVE_OPENBLAS
  return true;
#else
  return false;
#endif
}

void set_cpu_gemm(CpuGemm g) {
  if (g == CpuGemm::openblas && !has_openblas()) {
    throw ConfigError(
        "the CPU product \"openblas\" was asked for, but this program was built without OpenBLAS and has only \"own\": "
        "choose \"own\", or install OpenBLAS (Debian: libopenblas-dev) and configure again with KESTREL_OPENBLAS=ON");
  }
  chosen() = g;
}

CpuGemm cpu_gemm() {
  return chosen();
}

std::string cpu_gemm_description() {
#ifdef KESTREL_HAVE_OPENBLAS
  if (cpu_gemm() == CpuGemm::openblas) return cpu::openblas_description();
#endif
  return std::string("own ") + cpu::best_kernels().name + " GEMM";
}

namespace cpu {

void sgemm(Trans ta, Trans tb, int64_t M, int64_t N, int64_t K, float alpha, const float* A, int64_t lda,
           const float* B, int64_t ldb, float beta, float* C, int64_t ldc) {
  const Product p{ta, tb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc};
#ifdef KESTREL_HAVE_OPENBLAS
  // Inside a parallel region every thread has its own product to do; sizes of 0 are not OpenBLAS's to check.
  if (cpu_gemm() == CpuGemm::openblas && !omp_in_parallel() && std::min({M, N, K}) > 0) return openblas_parallel(p);
#endif
  own_parallel(best_kernels(), p);
}

void sgemm_serial(Trans ta, Trans tb, int64_t M, int64_t N, int64_t K, float alpha, const float* A, int64_t lda,
                  const float* B, int64_t ldb, float beta, float* C, int64_t ldc) {
  own_serial(best_kernels(), {ta, tb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc});
}

}  // namespace cpu
}  // namespace kestrel
