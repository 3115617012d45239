// Learning rate of a step.  `step` counts from 0, `total` is the number of steps of the run.
//
//   warm-up   peak (step+1)/warmup                        for step < warmup: the first step already has lr > 0
//   cosine    min + (peak-min)(1+cos(pi x))/2,            x = (step-warmup)/(total-1-warmup)
//   wsd       peak until the last decay_steps, then linear to min
//   constant  peak
// The last step of cosine and wsd has exactly min_lr; past the end they stay there.
#pragma once

#include "src/config/run_config.h"

namespace kestrel {

double learning_rate(const ScheduleConfig& schedule, int64_t step, int64_t total);

}  // namespace kestrel
