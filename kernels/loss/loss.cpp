#include "kernels/loss/loss.h"

#include "kernels/loss/loss_cpu.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "the loss has no ", name_of(s.device()), " back end in this build");
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

}  // namespace

void linear_cross_entropy(Stream& s, Tensor losses, Tensor dx, Tensor dw, Tensor x, Tensor w, Tensor targets,
                          float grad_scale) {
  const int64_t N = x.rows(), D = x.cols(), V = w.rows();
  KESTREL_CHECK(V >= 1, "a vocabulary of ", V, " tokens");
  check_matrix("x", x, DType::f32, N, D);
  check_matrix("w", w, DType::f32, V, D);
  check_vector("targets", targets, DType::i32, N);
  check_vector("losses", losses, DType::f32, N);
  if (dx) check_matrix("dx", dx, DType::f32, N, D);
  if (dw) check_matrix("dw", dw, DType::f32, V, D);
  ScratchScope scope(s);
  Tensor block = s.temp({cpu::logit_rows(N, V), V}, DType::f32);
  if (s.planning()) return;
  require_cpu(s);
  cpu::linear_cross_entropy(losses, dx, dw, x, w, targets, grad_scale, block);
}

void cross_entropy(Stream& s, Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float grad_scale) {
  const int64_t N = logits.rows(), V = logits.cols();
  KESTREL_CHECK(V >= 1, "a vocabulary of ", V, " tokens");
  check_matrix("logits", logits, DType::f32, N, V);
  check_vector("targets", targets, DType::i32, N);
  check_vector("losses", losses, DType::f32, N);
  if (dlogits) check_matrix("dlogits", dlogits, DType::f32, N, V);
  if (s.planning()) return;
  require_cpu(s);
  cpu::check_targets(targets.i32(), N, V);
  cpu::cross_entropy(N, V, losses.f32(), dlogits ? dlogits.f32() : nullptr, dlogits.ld, logits.f32(), logits.ld,
                     targets.i32(), grad_scale);
}

}  // namespace kestrel
