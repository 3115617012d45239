#include "kernels/router/balancing.h"

#include "kernels/core/device.h"
#include "kernels/core/math.h"
#include "kernels/core/profile.h"
#include "kernels/router/balancing_cpu.h"
#include "kernels/router/router_cuda.h"

namespace kestrel {
namespace {

void require_cpu(const Stream& s) {
  KESTREL_CHECK(s.device() == Device::cpu, "load balancing has no ", name_of(s.device()), " back end in this build");
}

void check_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  KESTREL_CHECK(t.dtype == dtype && t.numel() == n && t.contiguous(), name, " is ", t.describe(), ", expected ",
                name_of(dtype), "[", n, "]");
}

// Positions are found in fp32: every bin number must be exact there.
constexpr int64_t kMaxBins = int64_t{1} << 20;

void check_hist(const Tensor& hist, int64_t experts) {
  check_matrix("hist", hist, DType::i32, experts, -1);
  KESTREL_CHECK(hist.cols() >= 1 && hist.cols() <= kMaxBins, "hist has ", hist.cols(), " bins, 1 .. ", kMaxBins,
                " are possible");
}

// With k == E every expert takes every token: there is no cutoff and nothing to balance.
void check_k(int64_t k, int64_t experts) {
  KESTREL_CHECK(k >= 1 && k < experts, "balancing needs 1 <= k < experts, got k = ", k, " of ", experts);
}

}  // namespace

void quantile_histogram(Stream& s, Tensor hist, Tensor logits, Tensor cutoff, Tensor bias, Tensor valid) {
  const OpRange range(s, "quantile_histogram");
  const int64_t N = logits.rows(), E = logits.cols();
  check_matrix("logits", logits, DType::f32, N, E);
  check_hist(hist, E);
  check_vector("cutoff", cutoff, DType::f32, N);
  check_vector("bias", bias, DType::f32, E);
  if (valid) check_vector("valid", valid, DType::u8, N);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::quantile_histogram(s, hist, logits, cutoff, bias, valid);
  }
  require_cpu(s);
  cpu::quantile_histogram(hist, logits, cpu::Input::logits, cutoff, bias, valid);
}

void quantile_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float gain) {
  const OpRange range(s, "quantile_solve");
  const int64_t E = bias.numel();
  check_k(k, E);
  check_vector("bias", bias, DType::f32, E);
  check_hist(hist, E);
  KESTREL_CHECK(gain > 0.f && gain <= 1.f, "gain = ", gain, ", must be in (0, 1]: above 1 the loads oscillate");
  ScratchScope scope(s);
  Tensor next = s.temp({E}, DType::f64);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::quantile_solve(s, bias, hist, k, gain, next);
  }
  require_cpu(s);
  cpu::quantile_solve(bias, hist, k, gain, next);
}

void score_histogram(Stream& s, Tensor hist, Tensor logits, Tensor valid) {
  const OpRange range(s, "score_histogram");
  const int64_t N = logits.rows(), E = logits.cols();
  check_matrix("logits", logits, DType::f32, N, E);
  check_hist(hist, E);
  if (valid) check_vector("valid", valid, DType::u8, N);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::score_histogram(s, hist, logits, valid);
  }
  require_cpu(s);
  cpu::score_histogram(hist, logits, cpu::Input::logits, valid);
}

void dynamic_solve(Stream& s, Tensor bias, Tensor hist, int64_t k, float ema) {
  const OpRange range(s, "dynamic_solve");
  const int64_t E = bias.numel();
  check_k(k, E);
  check_vector("bias", bias, DType::f32, E);
  check_hist(hist, E);
  KESTREL_CHECK(ema >= 0.f && ema < 1.f, "ema = ", ema, ", must be in [0, 1)");
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::dynamic_solve(s, bias, hist, k, ema);
  }
  require_cpu(s);
  cpu::dynamic_solve(bias, hist, k, ema);
}

float dynamic_initial_bias(int64_t experts, int64_t k, float sigma) {
  check_k(k, experts);
  const double p = static_cast<double>(k) / static_cast<double>(experts);
  const double logit = static_cast<double>(sigma) * cpu::normal_upper_quantile(p);
  return static_cast<float>(-1.0 / (1.0 + std::exp(-logit)));
}

void margins(Stream& s, Tensor out, Tensor logits, Tensor cutoff, Tensor valid) {
  const OpRange range(s, "margins");
  const int64_t N = logits.rows(), E = logits.cols();
  check_matrix("logits", logits, DType::f32, N, E);
  check_matrix("margins", out, DType::f32, N, E);
  if (cutoff) check_vector("cutoff", cutoff, DType::f32, N);
  if (valid) check_vector("valid", valid, DType::u8, N);
  if (s.planning()) return;
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) return cuda::margins(s, out, logits, cutoff, valid);
  }
  require_cpu(s);
  cpu::margins(out, logits, cutoff, valid);
}

void exact_solve(Stream& s, Tensor b_hat, Tensor margins, int64_t k, bool centre) {
  const OpRange range(s, "exact_solve");
  const int64_t E = margins.cols();
  check_k(k, E);
  check_matrix("margins", margins, DType::f32, margins.rows(), E);
  check_vector("b_hat", b_hat, DType::f32, E);
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      const ScratchScope scope(s);
      const cuda::ExactScratch scratch{s.temp({E, 256}, DType::i32), s.temp({E}, DType::i32), s.temp({E}, DType::i64),
                                       s.temp({E}, DType::f64)};
      if (!s.planning()) cuda::exact_solve(s, b_hat, margins, k, centre, scratch);
      return;
    }
  }
  if (s.planning()) return;
  require_cpu(s);
  cpu::exact_solve(b_hat, margins, k, centre);
}

void sign_solve(Stream& s, Tensor bias, Tensor load, float rate) {
  const OpRange range(s, "sign_solve");
  check_vector("bias", bias, DType::f32, bias.numel());
  check_vector("load", load, DType::i32, bias.numel());
  if constexpr (kBuiltWithCuda) {
    if (s.device() == Device::cuda) {
      const ScratchScope scope(s);
      const Tensor next = s.temp({bias.numel()}, DType::f64);
      if (!s.planning()) cuda::sign_solve(s, bias, load, rate, next);
      return;
    }
  }
  if (s.planning()) return;
  require_cpu(s);
  cpu::sign_solve(bias, load, rate);
}

}  // namespace kestrel
