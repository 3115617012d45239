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

using Rows = UpdateShares::Rows;

// Elements that lie before a share's begin in the same 64: a state tensor keeps the alignment of its parameter.
constexpr int64_t kAlignment = 64;
int64_t lead(const UpdateShares& shares, Region r) {
  return shares.begin(r) % kAlignment;
}

int64_t m_elements(const UpdateShares& shares, Region r) {
  return lead(shares, r) + shares.end(r) - shares.begin(r);
}

// Rows of `part` (counted in the block) that are in the share.
Rows common_rows(const Rows& share, int64_t first, int64_t rows) {
  const int64_t a = std::max(share.first, first), b = std::min(share.last, first + rows);
  return {a, std::max(a, b)};
}

int64_t v_elements(const ParameterStore& store, const OptimizerConfig& config, const UpdateShares& shares) {
  int64_t n = 0;
  for (const Block& b : store.blocks()) {
    const Rows mine = shares.rows_of(b);
    for (const Member& m : b.members) {
      if (Optimizer::assignment(config, m).kind != Optimizer::Assignment::Kind::adamw) continue;
      for (int64_t i = 0; i < m.count; ++i) n += common_rows(mine, m.row + i * m.row_stride, m.rows).count() * b.cols;
    }
  }
  return n;
}

}  // namespace

int64_t Optimizer::state_bytes(const ParameterStore& store, const OptimizerConfig& config, const UpdateShares& shares) {
  return 4 *
         (m_elements(shares, Region::common) + m_elements(shares, Region::experts) + v_elements(store, config, shares));
}

Optimizer::Optimizer(ParameterStore& store, const OptimizerConfig& config, Device device, UpdateShares shares,
                     bool planned)
    : store_(store),
      config_(config),
      shares_(std::move(shares)),
      device_(device),
      square_sum_host_(planned ? Device::cpu : device, size_of(DType::f64)) {
  const int64_t bytes = state_bytes(store, config, shares_) + 4 * 256;
  memory_ = std::make_unique<Arena>(planned ? Arena::planner(device) : Arena(device, bytes));
  Stream zero(*memory_);
  for (const Region r : {Region::common, Region::experts}) {
    Tensor& m = m_[static_cast<size_t>(r)];
    m = memory_->keep({m_elements(shares_, r)}, DType::f32, "optimizer");
    fill_zero(zero, m);  // nothing on a planner
  }
  v_ = memory_->keep({v_elements(store, config, shares_)}, DType::f32, "optimizer");
  fill_zero(zero, v_);
  square_sum_ = memory_->keep({1}, DType::f64, "optimizer");
  int64_t v_offset = 0;
  for (Block& b : store.blocks()) {
    for (const Member& m : b.members) {
      const Assignment a = assignment(config, m);
      if (a.kind == Assignment::Kind::muon) add_muon(b, m);
      if (a.kind == Assignment::Kind::adamw) add_adamw(b, m, a.weight_decay, &v_offset);
    }
  }
}

Tensor Optimizer::momentum_of(const Block& b, int64_t row, int64_t rows) const {
  const int64_t at = b.offset + row * b.cols - shares_.begin(b.region) + lead(shares_, b.region);
  return m_[static_cast<size_t>(b.region)].slice(at, rows * b.cols).view({rows, b.cols});
}

void Optimizer::add_muon(Block& b, const Member& m) {
  const Rows mine = shares_.rows_of(b);
  // Blocks of `rows` rows each, `stride` rows apart, `count` from row `first` of the block: those in the share.
  const auto task = [&](int64_t first, int64_t count, int64_t rows, int64_t stride) {
    const auto before = [&](int64_t row) {
      return std::clamp<int64_t>(row <= first ? 0 : (row - first + stride - 1) / stride, 0, count);
    };
    const int64_t skipped = before(mine.first), n = before(mine.last) - skipped;
    if (n == 0) return;
    first += skipped * stride;
    const auto cut = [&](const Tensor& t, int64_t row) {
      return Tensor(static_cast<float*>(t.data) + row * b.cols, {n, rows, b.cols}, t.dtype, t.device);
    };
    const Tensor state = momentum_of(b, mine.first, mine.count());
    muon_.push_back({cut(b.master, first), cut(b.g, first), cut(state, first - mine.first), stride * b.cols});
  };
  if (m.family > 1) return task(m.row, m.count, m.rows, m.row_stride);
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
  for (int64_t i = 0; i < m.count; ++i) {
    const int64_t first = m.row + i * m.row_stride;
    const Rows r = common_rows(shares_.rows_of(b), first, m.rows);
    if (r.count() == 0) continue;
    const Tensor v = v_.slice(*v_offset, r.count() * b.cols).view({r.count(), b.cols});
    *v_offset += v.numel();
    v_of_.push_back({"optimizer.v." + m.name_of(i), m.shape, r.first - first, v});
    adamw_.push_back({b.master.slice(r.first, r.count()), b.g.slice(r.first, r.count()),
                      momentum_of(b, r.first, r.count()), v, decay});
  }
}

void Optimizer::plan(Stream& s) {
  KESTREL_CHECK(s.planning(), "plan takes a planner");
  queue_square_sum(s);
  step(s, 1, 0.0, 1.f);
}

void Optimizer::queue_square_sum(Stream& s) {
  const PhaseRange phase(s, "update");
  // Of the flat buffer: its padding and the places of untrained blocks are zeros.
  std::vector<Tensor> mine;
  for (const Region r : {Region::common, Region::experts}) {
    const int64_t n = shares_.end(r) - shares_.begin(r);
    if (n > 0) mine.push_back(store_.gradients(r).slice(shares_.begin(r), n));
  }
  if (!s.planning()) fill_zero(s, square_sum_);
  if (!mine.empty()) sum_of_squares(s, square_sum_, mine);
  if (!s.planning()) download(s, square_sum_host_.tensor({1}, DType::f64), square_sum_);
}

void Optimizer::measure(Stream& s, const Model& model) {
  shares_.sum_gradients(s, store_);
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
  return std::sqrt(shares_.sum_of(*square_sum_host_.tensor({1}, DType::f64).as<double>()));
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
  if (!s.planning()) shares_.gather_masters(s, store_);
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

void Optimizer::for_each_state(const std::function<void(const StatePart&)>& fn) const {
  store_.for_each([&](const NamedParameter& p) {
    const Block& b = *p.member->block;
    const Rows r = common_rows(shares_.rows_of(b), p.first_row, p.member->rows);
    if (!b.trained || r.count() == 0) return;
    fn({"optimizer.m." + p.name, p.shape, r.first - p.first_row, momentum_of(b, r.first, r.count())});
  });
  for (const StatePart& v : v_of_) fn(v);
}

}  // namespace kestrel
