// What a run costs, without allocating it: parameters, FLOPs, bytes by purpose.
#pragma once

#include <map>
#include <string>

#include "src/config/run_config.h"
#include "src/model/model.h"
#include "src/train/optimizer.h"

namespace kestrel {

struct Plan {
  // Parameters
  int64_t total = 0;      // trained parameters
  int64_t embedding = 0;  // of those, the look-up table (0 extra when tied)
  int64_t active = 0;     // used by one token: without the look-up and without experts that are not chosen
  int64_t routed = 0;     // in routed experts
  // FLOPs of forward and backward per token: 6 per active parameter, causal attention, KDA's products (chunk 64)
  double flops_parameters = 0, flops_attention = 0, flops_kda = 0;
  double flops() const { return flops_parameters + flops_attention + flops_kda; }
  int64_t ranks = 1;
  // Bytes on one rank, on the back end that train.device asks for and this build has
  Device device = Device::cpu;
  DType working = DType::f32;
  std::map<std::string, int64_t> bytes;
  int64_t arena_bytes = 0;  // of them, what one arena holds: activations and scratch
  int64_t total_bytes() const;
  int64_t tokens_per_step = 0;
};

// For the rank of `ranks` that needs most; ConfigError when parallel.expert does not divide them.
Plan plan_run(const RunConfig& config, int64_t ranks = 1);

// Runs everything that shares a run's arena over a planner: a training micro-batch, an evaluation, an update.
void plan_step(Stream& planner, Model& model, Optimizer& optimizer, const MicroBatch& micro, Tensor losses,
               const Model::PassOptions& pass);

// FLOPs of forward and backward per token at sequence length T.
double flops_per_token(const ModelConfig& config, int64_t T);

std::string plan_text(const RunConfig& config, const Plan& plan);
std::string plan_json(const Plan& plan);

}  // namespace kestrel
