#include "kernels/gemm/gemm.h"

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/parallel.h"
#include "kernels/core/profile.h"
#include "kernels/gemm/gemm_cuda.h"

namespace kestrel {
namespace {

// From this size one product keeps all threads busy; smaller ones of a batch are shared out whole.
constexpr int64_t kWorthAllThreads = int64_t{1} << 21;

struct Sizes {
  int64_t M, N, K;
};

void check_types(const Stream& s, const Tensor& c, const Tensor& a, const Tensor& b) {
  const bool floats = c.dtype == DType::f32 && a.dtype == DType::f32 && b.dtype == DType::f32;
  const bool halves =
      a.dtype == DType::bf16 && b.dtype == DType::bf16 && (c.dtype == DType::f32 || c.dtype == DType::bf16);
  KESTREL_CHECK(floats || (halves && s.device() == Device::cuda), "the ", name_of(s.device()),
                s.device() == Device::cpu ? " product takes F32 only: " : " product takes F32, or BF16 operands: ",
                c.describe(), " = ", a.describe(), " x ", b.describe());
  KESTREL_CHECK(c.device == s.device() && a.device == s.device() && b.device == s.device(), "a ", name_of(s.device()),
                " product of ", c.describe(), " = ", a.describe(), " x ", b.describe());
  KESTREL_CHECK(kBuiltWithCuda || s.device() == Device::cpu, "no ", name_of(s.device()), " product in this build");
}

Sizes check(const Stream& s, const Tensor& c, const Tensor& a, Trans ta, const Tensor& b, Trans tb) {
  check_types(s, c, a, b);
  const int64_t M = ta == Trans::no ? a.rows() : a.cols(), K = ta == Trans::no ? a.cols() : a.rows();
  const int64_t N = tb == Trans::no ? b.cols() : b.rows(), Kb = tb == Trans::no ? b.rows() : b.cols();
  KESTREL_CHECK(K == Kb && c.rows() == M && c.cols() == N, c.describe(), " = ", a.describe(),
                ta == Trans::yes ? "^T" : "", " x ", b.describe(), tb == Trans::yes ? "^T" : "");
  return {M, N, K};
}

cuda::GemmProblem cuda_problem(const Sizes& n, const Tensor& c, const Tensor& a, Trans ta, const Tensor& b, Trans tb,
                               float alpha, float beta) {
  cuda::GemmProblem p;
  p.ta = ta, p.tb = tb, p.M = n.M, p.N = n.N, p.K = n.K, p.alpha = alpha, p.beta = beta;
  p.a = a.data, p.b = b.data, p.c = c.data, p.lda = a.ld, p.ldb = b.ld, p.ldc = c.ld;
  p.in = a.dtype, p.out = c.dtype;
  return p;
}

}  // namespace

void gemm(Stream& s, Tensor c, Tensor a, Trans ta, Tensor b, Trans tb, float alpha, float beta) {
  const OpRange range(s, "gemm");
  const Sizes n = check(s, c, a, ta, b, tb);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::gemm(s, cuda_problem(n, c, a, ta, b, tb, alpha, beta));
  }
  cpu::sgemm(ta, tb, n.M, n.N, n.K, alpha, a.f32(), a.ld, b.f32(), b.ld, beta, c.f32(), c.ld);
}

void gemm_batched(Stream& s, Tensor c, Tensor a, Trans ta, Tensor b, Trans tb, float alpha, float beta) {
  const OpRange range(s, "gemm_batched");
  KESTREL_CHECK(c.rank == 3 && a.rank == 3 && b.rank == 3 && a.dim(0) == c.dim(0) && b.dim(0) == c.dim(0),
                "batched product of ", c.describe(), " = ", a.describe(), " x ", b.describe());
  KESTREL_CHECK(c.contiguous() && a.contiguous() && b.contiguous(), "batched product of views with gaps");
  const int64_t n = c.dim(0);
  if (n == 0) return;
  const Sizes one = check(s, c[0], a[0], ta, b[0], tb);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      cuda::GemmProblem p = cuda_problem(one, c[0], a[0], ta, b[0], tb, alpha, beta);
      p.batch = n, p.a_stride = a.dim(1) * a.dim(2), p.b_stride = b.dim(1) * b.dim(2), p.c_stride = one.M * one.N;
      return cuda::gemm(s, p);
    }
  }
  const auto product = [&](int64_t i, auto&& sgemm) {
    sgemm(ta, tb, one.M, one.N, one.K, alpha, a.f32() + i * a.dim(1) * a.dim(2), a.dim(2),
          b.f32() + i * b.dim(1) * b.dim(2), b.dim(2), beta, c.f32() + i * one.M * one.N, one.N);
  };
  if (one.M * one.N * one.K >= kWorthAllThreads) {
    for (int64_t i = 0; i < n; ++i) product(i, cpu::sgemm);
  } else {
    parallel_for(n, [&](int64_t i) { product(i, cpu::sgemm_serial); });
  }
}

void linear_forward(Stream& s, Tensor y, Tensor x, Tensor w) {
  const OpRange range(s, "linear_forward");
  gemm(s, y.matrix(), x.matrix(), Trans::no, w.matrix(), Trans::yes);
}

void linear_backward(Stream& s, Tensor dx, Tensor dw, Tensor dy, Tensor x, Tensor w, float dx_beta) {
  const OpRange range(s, "linear_backward");
  ScratchScope scope(s);
  dy = dy.matrix();
  if (dy.dtype != x.dtype && s.device() == Device::cuda) {
    const Tensor rounded = s.temp({dy.rows(), dy.cols()}, x.dtype);
    copy_cast(s, rounded, dy);
    dy = rounded;
  }
  if (dx) gemm(s, dx.matrix(), dy, Trans::no, w.matrix(), Trans::no, 1.f, dx_beta);
  if (dw) gemm(s, dw.matrix(), dy, Trans::yes, x.matrix(), Trans::no, 1.f, 1.f);
}

}  // namespace kestrel
