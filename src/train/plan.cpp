#include "src/train/plan.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kernels/core/device.h"
#include "src/train/device_choice.h"

namespace kestrel {
namespace {

constexpr int64_t kChunk = 64;

struct Counts {
  int64_t total = 0, embedding = 0, active = 0, routed = 0;
};

Counts count(const ModelConfig& c, const Model& model) {
  Counts n;
  for (const Block& b : model.parameters().blocks()) {
    if (!b.trained) continue;
    for (const Member& m : b.members) {
      const int64_t elements = m.rows * m.family * b.cols;  // on all ranks
      n.total += elements;
      const bool look_up = m.name == "model.embed_tokens.weight";
      if (look_up) n.embedding += elements;
      if (m.family > 1) {
        n.routed += elements;
        n.active += m.rows * b.cols * c.num_experts_per_token;
      } else if (!look_up || c.tie_word_embeddings) {
        n.active += elements;
      }
    }
  }
  return n;
}

std::string human(double x) {
  const char* units[] = {"", " K", " M", " G", " T", " P"};
  int u = 0;
  while (x >= 1000 && u < 5) x /= 1000, ++u;
  char out[32];
  std::snprintf(out, sizeof out, "%.*f%s", u ? 2 : 0, x, units[u]);
  return out;
}

std::string parameters(int64_t n) {  // the field's B for 1e9
  char out[32];
  const double x = static_cast<double>(n);
  if (x >= 1e12) {
    std::snprintf(out, sizeof out, "%.2f T", x / 1e12);
  } else if (x >= 1e9) {
    std::snprintf(out, sizeof out, x >= 1e11 ? "%.1f B" : "%.3f B", x / 1e9);
  } else {
    std::snprintf(out, sizeof out, "%.2f M", x / 1e6);
  }
  return out;
}

std::string memory_line(const std::string& purpose, int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double x = static_cast<double>(bytes);
  int u = 0;
  while (x >= 1024 && u < 4) x /= 1024, ++u;
  char line[96];
  std::snprintf(line, sizeof line, "  %-28s %9.2f %s\n", purpose.c_str(), x, units[u]);
  return line;
}

double attention_flops(const ModelConfig& c, int64_t T) {
  // QK^T and PV over T/2 keys on average; backward does both twice more.
  const double forward = 2.0 * static_cast<double>(c.qk_head_dim() + c.v_head_dim) * static_cast<double>(T) / 2.0;
  return 3.0 * forward * static_cast<double>(c.num_attention_heads * c.num_full_attention_layers());
}

double kda_flops(const ModelConfig& c) {
  const double K = static_cast<double>(c.linear_attn.head_dim), V = K;
  const double forward = 6 * K * V + 4 * kChunk * K + 4 * kChunk * V;  // kernels/kda/README.md
  return 3.0 * forward * static_cast<double>(c.linear_attn.num_heads * c.num_kda_layers());
}

// The back end to plan for: a GPU when the run asks for one, or would find one, and this build has kernels for it.
Device planned_device(const TrainConfig& c) {
  using Choice = TrainConfig::DeviceChoice;
  if (!kBuiltWithCuda || c.device == Choice::cpu) return Device::cpu;
  return c.device == Choice::cuda || device_count().count > 0 ? Device::cuda : Device::cpu;
}

// The share of the rank with the most optimizer state.
UpdateShares largest_share(const RunConfig& c, const ParameterStore& store, int64_t ranks) {
  const std::array<int64_t, 2> of{ranks, ranks / c.parallel.expert};
  UpdateShares largest(store, c.optimizer, of, {0, 0});
  int64_t most = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const UpdateShares share = largest.of_rank({r, r / c.parallel.expert});
    const int64_t bytes = Optimizer::state_bytes(store, c.optimizer, share);
    if (bytes > most) most = bytes, largest = share;
  }
  return largest;
}

void plan_memory(const RunConfig& c, Model& model, Plan& p) {
  const int64_t elements = model.parameters().elements(), T = c.data.sequence_length;
  const int64_t G = std::max(c.train.global_batch_size / p.ranks, c.train.micro_batch_size);
  const UpdateShares shares = largest_share(c, model.parameters(), p.ranks);
  p.bytes["weights (fp32 masters)"] = 4 * elements;
  if (p.working != DType::f32) p.bytes["weights (bf16 copies)"] = size_of(p.working) * elements;
  p.bytes["gradients (fp32)"] = 4 * elements;
  if (sums_gradients(c.train, p.device)) p.bytes["gradients (fp64 sums)"] = 8 * elements;
  p.bytes["optimizer state (fp32)"] = Optimizer::state_bytes(model.parameters(), c.optimizer, shares);

  model.parameters().plan(p.device, p.working);
  Arena state = Arena::planner(p.device), planner = Arena::planner(p.device);
  Optimizer optimizer(model.parameters(), c.optimizer, p.device, shares, /*planned=*/true);
  model.allocate_state(state, optimizer.clips_heads());
  p.bytes["balance statistics"] = state.peak();
  const MicroBatch batch = MicroBatch::allocate(state, G, T);
  const Tensor losses = state.keep({G * T}, DType::f32, "batch");
  p.bytes["batch"] = state.peak() - p.bytes["balance statistics"];

  const int64_t B = c.train.micro_batch_size;
  Stream s(planner);
  plan_step(s, model, optimizer, batch.rows(0, B), losses.slice(0, B * T), pass_options(c.train, p.device));
  for (const auto& [purpose, n] : planner.by_purpose()) {
    if (n > 0) p.bytes[purpose == "scratch" ? "scratch" : "activations: " + purpose] = n;
  }
  p.arena_bytes = planner.peak();
}

}  // namespace

double flops_per_token(const ModelConfig& c, int64_t T) {
  const Model model(c);
  return 6.0 * static_cast<double>(count(c, model).active) + attention_flops(c, T) + kda_flops(c);
}

int64_t Plan::total_bytes() const {
  int64_t n = 0;
  for (const auto& [purpose, b] : bytes) n += b;
  return n;
}

Plan plan_run(const RunConfig& c, int64_t ranks) {
  Model model(c.model, ExpertShare(0, c.parallel.expert));
  Plan p;
  p.ranks = ranks;
  const Counts n = count(c.model, model);
  p.total = n.total;
  p.embedding = n.embedding;
  p.active = n.active;
  p.routed = n.routed;
  p.flops_parameters = 6.0 * static_cast<double>(n.active);
  p.flops_attention = attention_flops(c.model, c.data.sequence_length);
  p.flops_kda = kda_flops(c.model);
  p.tokens_per_step = c.tokens_per_step();
  p.device = planned_device(c.train);
  p.working = working_dtype(c.train, p.device);
  plan_memory(c, model, p);
  return p;
}

void plan_step(Stream& s, Model& model, Optimizer& optimizer, const MicroBatch& micro, Tensor losses,
               const Model::PassOptions& pass) {
  model.begin_step(s);
  model.train(s, micro, losses, 1.f, pass);
  model.evaluate(s, micro, losses, pass);
  optimizer.plan(s);
  model.apply_balance(s);
}

namespace {

std::string memory_of(const Plan& p, const RunConfig& c) {
  if (p.ranks == 1) return "one rank, nothing sharded";
  return text("each of ", p.ranks, " ranks (", p.ranks / c.parallel.expert, " data x ", c.parallel.expert,
              " expert), optimizer state sharded");
}

}  // namespace

std::string plan_text(const RunConfig& c, const Plan& p) {
  std::ostringstream o;
  o << "model        " << c.model.num_hidden_layers << " layers (" << c.model.num_kda_layers() << " KDA, "
    << c.model.num_full_attention_layers() << " MLA; " << c.model.num_moe_layers() << " MoE, "
    << c.model.num_dense_layers() << " dense), width " << c.model.hidden_size << "\n"
    << "parameters   " << parameters(p.total) << " total, " << parameters(p.active)
    << " active per token (embedding look-up not counted), " << parameters(p.routed) << " in routed experts\n"
    << "FLOPs/token  " << human(p.flops()) << " forward and backward at T = " << c.data.sequence_length
    << " (parameters " << human(p.flops_parameters) << ", attention " << human(p.flops_attention) << ", KDA "
    << human(p.flops_kda) << ")\n"
    << "step         " << p.tokens_per_step << " tokens, " << human(p.flops() * static_cast<double>(p.tokens_per_step))
    << "FLOP\n"
    << "memory       " << memory_of(p, c) << ", micro-batch " << c.train.micro_batch_size << " x "
    << c.data.sequence_length << ", recompute " << to_string(c.train.recompute) << ", "
    << (p.device == Device::cuda ? "CUDA" : "CPU") << " back end in " << (p.working == DType::bf16 ? "bf16" : "fp32")
    << (c.train.device == TrainConfig::DeviceChoice::cuda && !kBuiltWithCuda ? " (this build has no CUDA back end)"
                                                                             : "")
    << "\n";
  for (const auto& [purpose, b] : p.bytes) o << memory_line(purpose, b);
  o << memory_line("total", p.total_bytes());
  return o.str();
}

std::string plan_json(const Plan& p) {
  nlohmann::ordered_json j;
  j["parameters"] = {
      {"total", p.total}, {"active", p.active}, {"embedding", p.embedding}, {"routed_experts", p.routed}};
  j["flops_per_token"] = {
      {"total", p.flops()}, {"parameters", p.flops_parameters}, {"attention", p.flops_attention}, {"kda", p.flops_kda}};
  j["tokens_per_step"] = p.tokens_per_step;
  j["back_end"] = p.device == Device::cuda ? "cuda" : "cpu";
  j["precision"] = p.working == DType::bf16 ? "bf16" : "fp32";
  j["bytes"] = p.bytes;
  j["arena_bytes"] = p.arena_bytes;
  j["total_bytes"] = p.total_bytes();
  return j.dump(2);
}

}  // namespace kestrel
