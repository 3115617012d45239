#include "src/train/schedule.h"

#include <cmath>
#include <numbers>

namespace kestrel {

double learning_rate(const ScheduleConfig& c, int64_t step, int64_t total) {
  using Kind = ScheduleConfig::Kind;
  const int64_t last = total - 1;
  if (c.kind != Kind::constant && step >= last) return c.min_lr;
  if (step < c.warmup_steps) return c.peak_lr * static_cast<double>(step + 1) / static_cast<double>(c.warmup_steps);
  switch (c.kind) {
    case Kind::constant:
      return c.peak_lr;
    case Kind::cosine: {
      const double x = static_cast<double>(step - c.warmup_steps) / static_cast<double>(last - c.warmup_steps);
      return c.min_lr + (c.peak_lr - c.min_lr) * 0.5 * (1.0 + std::cos(std::numbers::pi * x));
    }
    case Kind::wsd: {
      const int64_t start = last - c.decay_steps;
      if (step <= start) return c.peak_lr;
      return c.min_lr +
             (c.peak_lr - c.min_lr) * (1.0 - static_cast<double>(step - start) / static_cast<double>(c.decay_steps));
    }
  }
  return c.peak_lr;
}

}  // namespace kestrel
