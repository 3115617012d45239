#include "kernels/loss/loss.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/loss/loss_cpu.h"
#include "kernels/loss/loss_cuda.h"

namespace kestrel {
namespace {

// CPU activations are F32; on CUDA they are F32 or BF16.
void check_device(const Stream& s, DType dtype) {
  KESTREL_CHECK(kBuiltWithCuda || s.device() == Device::cpu, "the loss has no ", name_of(s.device()),
                " back end in this build");
  KESTREL_CHECK(dtype == DType::f32 || (dtype == DType::bf16 && s.device() == Device::cuda), "a loss on ",
                name_of(s.device()), " of ", name_of(dtype));
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

}  // namespace

void linear_cross_entropy(Stream& s, Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets,
                          float grad_scale) {
  const OpRange range(s, "linear_cross_entropy");
  const int64_t N = x.rows(), D = x.cols(), V = w.rows();
  KESTREL_CHECK(V >= 1, "a vocabulary of ", V, " tokens");
  check_device(s, x.dtype);
  check_matrix("x", x, x.dtype, N, D);
  check_matrix("w", w, x.dtype, V, D);
  check_vector("targets", targets, DType::i32, N);
  check_vector("losses", losses, DType::f32, N);
  if (dx) check_matrix("dx", dx, x.dtype, N, D);
  if (dw) check_matrix("dw", dw, DType::f32, V, D);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      return cuda::linear_cross_entropy(s, losses, dx, dw, x, w, targets, grad_scale);
    }
  }
  ScratchScope scope(s);
  Tensor block = s.temp({cpu::logit_rows(N, V), V}, DType::f32);
  if (s.planning()) return;
  cpu::linear_cross_entropy(losses, dx, dw, x, w, targets, grad_scale, block);
}

void cross_entropy(Stream& s, Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float grad_scale) {
  const OpRange range(s, "cross_entropy");
  const int64_t N = logits.rows(), V = logits.cols();
  check_device(s, DType::f32);
  KESTREL_CHECK(V >= 1, "a vocabulary of ", V, " tokens");
  check_matrix("logits", logits, DType::f32, N, V);
  check_vector("targets", targets, DType::i32, N);
  check_vector("losses", losses, DType::f32, N);
  if (dlogits) check_matrix("dlogits", dlogits, DType::f32, N, V);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::cross_entropy(s, losses, dlogits, logits, targets, grad_scale);
  }
  cpu::check_targets(targets.i32(), N, V);
  cpu::cross_entropy(N, V, losses.f32(), dlogits ? dlogits.f32() : nullptr, dlogits.ld, logits.f32(), logits.ld,
                     targets.i32(), grad_scale);
}

}  // namespace kestrel
