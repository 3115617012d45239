#include "kernels/optimizer/optimizer.h"

#include <cmath>

#include "kernels/core/device.h"
#include "kernels/core/parallel.h"
#include "kernels/core/profile.h"
#include "kernels/optimizer/optimizer_cpu.h"
#include "kernels/optimizer/optimizer_cuda.h"

namespace kestrel {
namespace {

void check_device(const Stream& s, const Tensor& t) {
  KESTREL_CHECK(kBuiltWithCuda || s.device() == Device::cpu, "no ", name_of(s.device()), " optimizer in this build");
  KESTREL_CHECK(t.device == s.device(), "the ", name_of(s.device()), " optimizer was given ", t.describe());
}

// A parameter or one of its companions: F32, dense, and of the parameter's shape.
void check_like(const char* name, const Tensor& t, const Tensor& p) {
  KESTREL_CHECK(t.dtype == DType::f32 && t.contiguous() && t.rank == p.rank && t.shape == p.shape, name, " is ",
                t.describe(), ", expected a contiguous F32 tensor like the parameter ", p.describe());
}

// [out, in] of weights and what belongs to it: in / per_element columns of `dtype`.
void check_groups(const char* name, const Tensor& t, DType dtype, const Tensor& w, int64_t per_element) {
  KESTREL_CHECK(w.dtype == DType::f32 && w.cols() % 32 == 0, "MXFP4 takes F32 rows of a multiple of 32 elements, got ",
                w.describe());
  check_matrix(name, t, dtype, w.rows(), w.cols() / per_element);
}

template <class T>
T* row(const Tensor& t, int64_t r) {
  return t.as<T>() + r * t.ld;
}

constexpr int64_t kRowGrain = 16;

}  // namespace

void adamw_step(Stream& s, const AdamW& h, Tensor p, Tensor g, Tensor m, Tensor v, float grad_scale) {
  const OpRange range(s, "adamw_step");
  check_like("p", p, p);
  check_like("g", g, p);
  check_like("m", m, p);
  check_like("v", v, p);
  KESTREL_CHECK(h.t >= 1, "AdamW counts its steps from 1, got ", h.t);
  if (s.planning()) return;
  check_device(s, p);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::adamw_step(s, h, p, g, m, v, grad_scale);
  }
  cpu::adamw(h, p.numel(), p.f32(), g.f32(), m.f32(), v.f32(), grad_scale);
}

void newton_schulz(Stream& s, Tensor x, int steps) {
  const OpRange range(s, "newton_schulz");
  check_like("x", x, x);
  KESTREL_CHECK(x.rank == 3 && steps >= 0, "Newton-Schulz of ", x.describe(), ", ", steps, " steps");
  if (x.numel() == 0) return;
  if (!s.planning()) check_device(s, x);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::newton_schulz(s, x, steps);
  }
  const cpu::NewtonSchulzPlan plan(x.dim(0), x.dim(1), x.dim(2));
  const ScratchScope scope(s);
  const Tensor scratch = s.temp({plan.slots, plan.floats_per_slot()});
  if (s.planning()) return;
  cpu::newton_schulz(plan, x.dim(0), x.f32(), steps, scratch.f32());
}

void muon_step(Stream& s, const Muon& h, Tensor p, Tensor g, Tensor m, int64_t block_stride, float grad_scale) {
  const OpRange range(s, "muon_step");
  check_like("p", p, p);
  check_like("g", g, p);
  check_like("m", m, p);
  KESTREL_CHECK(p.rank == 3 && h.ns_steps >= 0, "a Muon step of ", p.describe(), ", ", h.ns_steps, " steps");
  const int64_t dense = p.dim(1) * p.dim(2), stride = block_stride == 0 ? dense : block_stride;
  KESTREL_CHECK(stride >= dense, "blocks of ", p.describe(), " lie only ", stride, " elements apart");
  if (p.numel() == 0) return;
  if (!s.planning()) check_device(s, p);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::muon_step(s, h, p, g, m, stride, grad_scale);
  }
  const cpu::NewtonSchulzPlan plan(p.dim(0), p.dim(1), p.dim(2));
  const ScratchScope scope(s);
  const Tensor scratch = s.temp({plan.slots, plan.floats_per_slot()});
  if (s.planning()) return;
  cpu::muon(plan, h, p.dim(0), stride, p.f32(), g.f32(), m.f32(), grad_scale, scratch.f32());
}

void sum_of_squares(Stream& s, Tensor out, const std::vector<Tensor>& tensors) {
  const OpRange range(s, "sum_of_squares");
  KESTREL_CHECK(out.dtype == DType::f64 && out.numel() == 1, "the sum of squares goes to F64[1], got ", out.describe());
  for (const Tensor& t : tensors) KESTREL_CHECK(t.dtype == DType::f32, "sum of squares of ", t.describe());
  if (!s.planning()) check_device(s, out);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::sum_of_squares(s, out, tensors);
  }
  if (s.planning()) return;
  double total = 0;
  for (const Tensor& t : tensors) {
    if (t.contiguous()) {
      total += cpu::sum_of_squares(t.numel(), t.f32());
    } else {
      for (int64_t r = 0; r < t.rows(); ++r) total += cpu::sum_of_squares(t.cols(), row<float>(t, r));
    }
  }
  *out.as<double>() += total;
}

void qk_clip(Stream& s, Tensor w_q, Tensor w_kv, Tensor s_max, float tau, int64_t nope, int64_t rope, int64_t v) {
  const OpRange range(s, "qk_clip");
  const int64_t H = s_max.numel();
  check_matrix("w_q", w_q, DType::f32, H * (nope + rope), -1);
  check_matrix("w_kv", w_kv, DType::f32, H * (nope + v), -1);
  KESTREL_CHECK(s_max.dtype == DType::f32 && s_max.contiguous() && tau > 0.f, "s_max ", s_max.describe(), ", tau ",
                tau);
  if (s.planning()) return;
  check_device(s, w_q);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::qk_clip(s, w_q, w_kv, s_max, tau, nope, rope, v);
  }
  parallel_for(H, [&](int64_t h) {
    const float most = s_max.f32()[h];
    if (!(most > tau && most < HUGE_VALF)) return;  // no logit above tau, or no number at all: leave the head alone
    const float gamma = tau / most, root = std::sqrt(gamma);
    const int64_t q = h * (nope + rope);
    cpu::scale_rows(nope, w_q.cols(), row<float>(w_q, q), w_q.ld, root);
    cpu::scale_rows(rope, w_q.cols(), row<float>(w_q, q + nope), w_q.ld, gamma);
    cpu::scale_rows(nope, w_kv.cols(), row<float>(w_kv, h * (nope + v)), w_kv.ld, root);
  });
}

void mxfp4_pack(Stream& s, Tensor packed, Tensor scale, Tensor w) {
  const OpRange range(s, "mxfp4_pack");
  check_groups("packed", packed, DType::u8, w, 2);
  check_groups("scale", scale, DType::u8, w, 32);
  if (s.planning()) return;
  check_device(s, w);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mxfp4_pack(s, packed, scale, w);
  }
  parallel_pieces(w.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      cpu::mxfp4_quantize_row(w.cols(), row<float>(w, r), row<uint8_t>(packed, r), row<uint8_t>(scale, r), nullptr);
    }
  });
}

void mxfp4_unpack(Stream& s, Tensor dequantized, Tensor packed, Tensor scale) {
  const OpRange range(s, "mxfp4_unpack");
  check_groups("packed", packed, DType::u8, dequantized, 2);
  check_groups("scale", scale, DType::u8, dequantized, 32);
  if (s.planning()) return;
  check_device(s, dequantized);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mxfp4_unpack(s, dequantized, packed, scale);
  }
  parallel_pieces(packed.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      cpu::mxfp4_unpack_row(dequantized.cols(), row<uint8_t>(packed, r), row<uint8_t>(scale, r),
                            row<float>(dequantized, r));
    }
  });
}

void mxfp4_fake_quantize(Stream& s, Tensor dequantized, Tensor w) {
  const OpRange range(s, "mxfp4_fake_quantize");
  check_groups("dequantized", dequantized, DType::f32, w, 1);
  if (s.planning()) return;
  check_device(s, w);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::mxfp4_fake_quantize(s, dequantized, w);
  }
  parallel_pieces(w.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      cpu::mxfp4_quantize_row(w.cols(), row<float>(w, r), nullptr, nullptr, row<float>(dequantized, r));
    }
  });
}

}  // namespace kestrel
