#include "src/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/profile.h"
#include "kernels/core/transfer.h"

namespace kestrel {

Optimizer::Assignment Optimizer::assignment(const OptimizerConfig& config, const Member& m) {
  using Kind = Assignment::Kind;
  switch (m.rule) {
    case Rule::balance:
      return {};
    case Rule::adamw:
      return {Kind::adamw, true, {}};
    case Rule::adamw_no_decay:
      return {Kind::adamw, false, {}};
    case Rule::muon:
      break;
  }
  if (config.type == OptimizerConfig::Type::adamw) return {Kind::adamw, true, {}};
  Assignment a{Kind::muon, true, {m.rows}};
  if (!config.per_head) return a;
  const int64_t period = std::accumulate(m.muon_blocks.begin(), m.muon_blocks.end(), int64_t{0});
  a.row_blocks.clear();
  for (int64_t r = 0; r < m.rows; r += period)
    a.row_blocks.insert(a.row_blocks.end(), m.muon_blocks.begin(), m.muon_blocks.end());
  return a;
}

namespace {

int64_t v_elements(const ParameterStore& store, const OptimizerConfig& config) {
  int64_t n = 0;
  for (const Block& b : store.blocks()) {
    for (const Member& m : b.members) {
      if (Optimizer::assignment(config, m).kind == Optimizer::Assignment::Kind::adamw) n += m.rows * m.count * b.cols;
    }
  }
  return n;
}

}  // namespace

int64_t Optimizer::state_bytes(const ParameterStore& store, const OptimizerConfig& config) {
  return 4 * (store.elements() + v_elements(store, config));
}

Optimizer::Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device, bool planned)
    : store_(store),
      config_(config),
      device_(device),
      square_sum_host_(planned ? Device::cpu : device, size_of(DType::f64)) {
  const int64_t nv = v_elements(store, config);
  memory_ =
      std::make_unique<Arena>(planned ? Arena::planner(device) : Arena(device, 4 * (store.elements() + nv) + 3 * 256));
  m_ = memory_->keep({store.elements()}, DType::f32, "optimizer");
  v_ = memory_->keep({nv}, DType::f32, "optimizer");
  square_sum_ = memory_->keep({1}, DType::f64, "optimizer");
  Stream zero(*memory_);
  fill_zero(zero, m_);  // nothing on a planner
  fill_zero(zero, v_);
  int64_t v_offset = 0;
  for (Block& b : store.blocks()) {
    for (const Member& m : b.members) {
      const Assignment a = assignment(config, m);
      if (a.kind == Assignment::Kind::muon) add_muon(b, m);
      if (a.kind == Assignment::Kind::adamw) add_adamw(b, m, a.weight_decay, &v_offset);
    }
  }
}

void Optimizer::add_muon(Block& b, const Member& m) {
  const Tensor state = state_of(m_, b);
  // `count` blocks of `rows` rows each, `stride` rows apart, from row `first` of the block.
  const auto task = [&](int64_t first, int64_t count, int64_t rows, int64_t stride) {
    const auto cut = [&](const Tensor& t) {
      Tensor v(static_cast<float*>(t.data) + first * b.cols, {count, rows, b.cols}, t.dtype, t.device);
      return v;
    };
    muon_.push_back({cut(b.master), cut(b.g), cut(state), stride * b.cols});
  };
  if (m.count > 1) return task(m.row, m.count, m.rows, m.row_stride);
  const std::vector<int64_t> pattern = config_.per_head ? m.muon_blocks : std::vector<int64_t>{m.rows};
  const int64_t period = std::accumulate(pattern.begin(), pattern.end(), int64_t{0});
  KESTREL_CHECK(m.rows % period == 0, m.name, " has ", m.rows, " rows, its blocks repeat every ", period);
  int64_t first = m.row;
  for (int64_t rows : pattern) {
    task(first, m.rows / period, rows, period);
    first += rows;
  }
}

void Optimizer::add_adamw(Block& b, const Member& m, bool decay, int64_t* v_offset) {
  const int64_t rows = m.rows * m.count;
  KESTREL_CHECK(m.count == 1 || m.row_stride == m.rows || config_.type == OptimizerConfig::Type::adamw, m.name,
                " is interleaved");
  const Tensor v = v_.slice(*v_offset, rows * b.cols).view({rows, b.cols});
  *v_offset += rows * b.cols;
  v_of_.emplace_back(&m, v);
  const Tensor state = state_of(m_, b);
  for (int64_t i = 0; i < m.count; ++i) {
    const int64_t r = m.row + i * m.row_stride;
    adamw_.push_back(
        {b.master.slice(r, m.rows), b.g.slice(r, m.rows), state.slice(r, m.rows), v.slice(i * m.rows, m.rows), decay});
  }
}

void Optimizer::plan(Stream& s) {
  KESTREL_CHECK(s.planning(), "plan takes a planner");
  queue_square_sum(s);
  step(s, 1, 0.0, 1.f);
}

void Optimizer::queue_square_sum(Stream& s) {
  const PhaseRange phase(s, "update");
  // The flat buffer: its padding and the places of untrained blocks are zeros.
  if (!s.planning()) fill_zero(s, square_sum_);
  sum_of_squares(s, square_sum_, {store_.gradients()});
  if (!s.planning()) download(s, square_sum_host_.tensor({1}, DType::f64), square_sum_);
}

void Optimizer::measure(Stream& s, const Model& model) {
  queue_square_sum(s);
  if (!config_.qk_clip) return;
  const auto& layers = model.mla_layers();
  const int64_t L = static_cast<int64_t>(layers.size()), H = L > 0 ? layers[0]->dims(0).H : 0;
  if (max_logits_host_.bytes() == 0) max_logits_host_ = PinnedBuffer(device_, L * H * size_of(DType::f32));
  for (int64_t l = 0; l < L; ++l) {
    download(s, max_logits_host_.tensor({L, H}, DType::f32)[l], layers[static_cast<size_t>(l)]->max_logit());
  }
}

double Optimizer::gradient_norm() const {
  return std::sqrt(*square_sum_host_.tensor({1}, DType::f64).as<double>());
}

float Optimizer::clip_scale(double norm) const {
  return config_.grad_clip ? static_cast<float>(std::min(1.0, *config_.grad_clip / (norm + 1e-6))) : 1.f;
}

void Optimizer::step(Stream& s, int64_t update, double lr, float grad_scale) {
  const PhaseRange phase(s, "update");
  Muon muon;
  muon.lr = static_cast<float>(lr);
  muon.momentum = static_cast<float>(config_.momentum);
  muon.weight_decay = static_cast<float>(config_.weight_decay);
  muon.nesterov = config_.nesterov;
  muon.ns_steps = static_cast<int>(config_.newton_schulz_steps);
  muon.update_scale = static_cast<float>(config_.muon_lr_scale);
  for (const MuonTask& t : muon_) muon_step(s, muon, t.p, t.g, t.m, t.stride, grad_scale);

  AdamW adamw{};
  adamw.lr = static_cast<float>(lr);
  adamw.beta1 = static_cast<float>(config_.beta1);
  adamw.beta2 = static_cast<float>(config_.beta2);
  adamw.eps = static_cast<float>(config_.eps);
  adamw.t = update;
  for (const AdamWTask& t : adamw_) {
    adamw.weight_decay = t.decay ? static_cast<float>(config_.weight_decay) : 0.f;
    adamw_step(s, adamw, t.p, t.g, t.m, t.v, grad_scale);
  }
  store_.refresh_working(s);
}

int64_t Optimizer::clip_heads(Stream& s, Model& model) {
  if (!config_.qk_clip) return 0;
  const PhaseRange phase(s, "update");
  const float tau = static_cast<float>(*config_.qk_clip);
  const int64_t logits = max_logits_host_.bytes() / size_of(DType::f32);
  const float* host = max_logits_host_.tensor({logits}, DType::f32).f32();
  const int64_t clipped = std::count_if(host, host + logits, [&](float x) { return x > tau && std::isfinite(x); });
  for (MlaLayer* layer : model.mla_layers()) {
    const MlaDims d = layer->dims(0);
    qk_clip(s, layer->query_block()->master.slice(0, d.H * (d.nope + d.rope)), layer->kv_block()->master,
            layer->max_logit(), tau, d.nope, d.rope, d.v);
  }
  store_.refresh_working(s);
  return clipped;
}

void Optimizer::for_each_state(
    const std::function<void(const std::string&, const std::vector<int64_t>&, Tensor)>& fn) const {
  store_.for_each([&](const NamedParameter& p) {
    if (p.member->block->trained) fn("optimizer.m." + p.name, p.shape, p.rows_of(state_of(m_, *p.member->block)));
  });
  for (const auto& [member, v] : v_of_) {
    for (int64_t i = 0; i < member->count; ++i)
      fn("optimizer.v." + member->name_of(i), member->shape, v.slice(i * member->rows, member->rows));
  }
}

}  // namespace kestrel
