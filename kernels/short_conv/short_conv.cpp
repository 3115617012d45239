#include "kernels/short_conv/short_conv.h"

#include "kernels/core/device.h"
#include "kernels/core/profile.h"
#include "kernels/short_conv/short_conv_cpu.h"
#include "kernels/short_conv/short_conv_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s, const Tensor& x) {
  KESTREL_CHECK(s.device() == Device::cpu, "no ", name_of(s.device()), " back end for short_conv in this build");
  KESTREL_CHECK(x.dtype == DType::f32, "x is ", x.describe(), ", the CPU computes in F32 only");
}

void check_input(const cpu::ConvInput& in) {
  const int64_t W = in.weight.cols(), C = in.x.cols();
  KESTREL_CHECK(in.B >= 0 && in.T >= 0, "B is ", in.B, ", T is ", in.T);
  check_matrix("x", in.x, in.x.dtype, in.B * in.T, -1);
  check_matrix("weight", in.weight, DType::f32, C, -1);
  KESTREL_CHECK(W >= 1 && W <= cpu::kMaxConvWidth && in.weight.contiguous(), "weight is ", in.weight.describe(),
                ", expected contiguous [C,W] with 1 <= W <= ", cpu::kMaxConvWidth);
  if (in.document_start) check_matrix("document_start", in.document_start, DType::i32, in.B, in.T);
  if (in.history) check_matrix("history", in.history, in.x.dtype, in.B * (W - 1), C);
}

}  // namespace

void short_conv_forward(Stream& s, int64_t B, int64_t T, Tensor y, Tensor x, Tensor weight, Tensor document_start,
                        Tensor history) {
  const OpRange range(s, "short_conv_forward");
  const cpu::ConvInput in{B, T, x, weight, document_start, history};
  check_input(in);
  check_matrix("y", y, x.dtype, B * T, x.cols());
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::short_conv_forward(s, B, T, y, x, weight, document_start, history);
  }
  require_cpu(s, x);
  cpu::short_conv_forward(in, y);
}

void short_conv_backward(Stream& s, int64_t B, int64_t T, Tensor dx, Tensor dweight, Tensor dy, Tensor x, Tensor weight,
                         Tensor document_start) {
  const OpRange range(s, "short_conv_backward");
  const cpu::ConvInput in{B, T, x, weight, document_start, {}};
  check_input(in);
  check_matrix("dx", dx, x.dtype, B * T, x.cols());
  check_matrix("dy", dy, x.dtype, B * T, x.cols());
  check_matrix("dweight", dweight, DType::f32, weight.rows(), weight.cols());
  KESTREL_CHECK(dweight.contiguous(), "dweight is ", dweight.describe(), ", expected a contiguous tensor");
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda)
      return cuda::short_conv_backward(s, B, T, dx, dweight, dy, x, weight, document_start);
  }
  ScratchScope scope(s);
  const Tensor partial = s.temp({cpu::conv_pieces(B, T), weight.cols(), x.cols()});
  if (s.planning()) return;
  require_cpu(s, x);
  cpu::short_conv_backward(in, dx, dweight.f32(), dy, partial.f32());
}

}  // namespace kestrel
