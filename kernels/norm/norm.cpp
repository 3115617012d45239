#include "kernels/norm/norm.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/norm/norm_cpu.h"
#include "kernels/norm/norm_cuda.h"
#include "kernels/norm/rows.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for norms in this build");
}

// A dense F32 vector of n elements, whatever its rank.
void check_vector(const char* name, const Tensor& t, int64_t n) {
  KESTREL_CHECK(t.dtype == DType::f32 && t.numel() == n && t.contiguous(), name, " is ", t.describe(),
                ", expected F32 with ", n, " contiguous elements");
}

void check_input(const Tensor& x) {
  KESTREL_CHECK(x.rank >= 1 && x.cols() >= 1, "x is ", x.describe(), ", expected [N,D] with D >= 1");
}

int64_t heads_of(const Tensor& x, const Tensor& weight) {
  const int64_t K = weight.numel();
  KESTREL_CHECK(K >= 1 && x.cols() % K == 0, "x is ", x.describe(), ", not a whole number of heads of ", K);
  return x.cols() / K;
}

}  // namespace

void rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor weight, float eps) {
  const OpRange range(s, "rms_norm_forward");
  check_input(x);
  check_matrix("y", y, x.dtype, x.rows(), x.cols());
  check_vector("rstd", rstd, x.rows());
  check_vector("weight", weight, x.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::rms_norm_forward(s, y, rstd, x, weight, eps);
  }
  require_cpu(s);
  cpu::rms_norm_forward(y, rstd.f32(), x, weight.f32(), eps);
}

void rms_norm_backward(Stream& s, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight, Tensor rstd,
                       float dx_beta) {
  const OpRange range(s, "rms_norm_backward");
  check_input(x);
  const int64_t N = x.rows(), D = x.cols();
  KESTREL_CHECK(dx.rows() == N && dx.cols() == D, "dx is ", dx.describe(), ", x is ", x.describe());
  check_matrix("dy", dy, x.dtype, N, D);
  check_vector("rstd", rstd, N);
  check_vector("weight", weight, D);
  check_vector("dweight", dweight, D);
  KESTREL_CHECK(dx_beta == 0.f || dx_beta == 1.f, "dx_beta is ", dx_beta, ", expected 0 or 1");
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::rms_norm_backward(s, dx, dweight, dy, x, weight, rstd, dx_beta);
  }
  ScratchScope scope(s);
  const Tensor partial = s.temp({cpu::row_pieces(N), D});
  if (s.planning()) return;
  require_cpu(s);
  cpu::rms_norm_backward(dx, dweight.f32(), dy, x, weight.f32(), rstd.f32(), dx_beta == 1.f, partial.f32());
}

void gated_rms_norm_forward(Stream& s, Tensor y, Tensor rstd, Tensor x, Tensor gate, Tensor weight, float eps) {
  const OpRange range(s, "gated_rms_norm_forward");
  check_input(x);
  const int64_t H = heads_of(x, weight);
  check_matrix("y", y, x.dtype, x.rows(), x.cols());
  check_matrix("gate", gate, x.dtype, x.rows(), x.cols());
  check_vector("rstd", rstd, x.rows() * H);
  check_vector("weight", weight, x.cols() / H);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::gated_rms_norm_forward(s, y, rstd, x, gate, weight, eps);
  }
  require_cpu(s);
  cpu::gated_rms_norm_forward(y, rstd.f32(), x, gate, weight.f32(), x.cols() / H, eps);
}

void gated_rms_norm_backward(Stream& s, Tensor dx, Tensor dgate, Tensor dweight, Tensor dy, Tensor x, Tensor gate,
                             Tensor weight, Tensor rstd) {
  const OpRange range(s, "gated_rms_norm_backward");
  check_input(x);
  const int64_t N = x.rows(), C = x.cols(), H = heads_of(x, weight), K = C / H;
  check_matrix("dx", dx, x.dtype, N, C);
  check_matrix("dgate", dgate, x.dtype, N, C);
  check_matrix("dy", dy, x.dtype, N, C);
  check_matrix("gate", gate, x.dtype, N, C);
  check_vector("rstd", rstd, N * H);
  check_vector("weight", weight, K);
  check_vector("dweight", dweight, K);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda)
      return cuda::gated_rms_norm_backward(s, dx, dgate, dweight, dy, x, gate, weight, rstd);
  }
  ScratchScope scope(s);
  const Tensor partial = s.temp({cpu::row_pieces(N), K});
  if (s.planning()) return;
  require_cpu(s);
  cpu::gated_rms_norm_backward(dx, dgate, dweight.f32(), dy, x, gate, weight.f32(), rstd.f32(), K, partial.f32());
}

void l2_norm_forward(Stream& s, Tensor y, Tensor x, float eps) {
  const OpRange range(s, "l2_norm_forward");
  check_input(x);
  check_matrix("y", y, x.dtype, x.rows(), x.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::l2_norm_forward(s, y, x, eps);
  }
  require_cpu(s);
  cpu::l2_norm_forward(y, x, eps);
}

void l2_norm_backward(Stream& s, Tensor dx, Tensor dy, Tensor x, float eps) {
  const OpRange range(s, "l2_norm_backward");
  check_input(x);
  check_matrix("dx", dx, x.dtype, x.rows(), x.cols());
  check_matrix("dy", dy, x.dtype, x.rows(), x.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::l2_norm_backward(s, dx, dy, x, eps);
  }
  require_cpu(s);
  cpu::l2_norm_backward(dx, dy, x, eps);
}

}  // namespace kestrel
