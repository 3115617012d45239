#include "src/model/parameters.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/parallel.h"
#include "kernels/core/profile.h"
#include "kernels/core/transfer.h"
#include "src/model/random.h"

namespace kestrel {
namespace {

constexpr int64_t kBlockAlignment = 64;  // elements: 256 bytes in fp32, 128 in bf16
// Masters, copies, gradients and optimizer state together stay below 2^60 bytes.
constexpr int64_t kMostElements = int64_t{1} << 55;

// Mamba-2's start: a step size dt log-uniform in [1e-3, 1e-1], stored through the inverse of softplus.
double dt_bias_start(double u) {
  const double dt = std::max(std::exp(std::log(1e-3) + u * (std::log(1e-1) - std::log(1e-3))), 1e-4);
  return dt + std::log(-std::expm1(-dt));
}

void fill(float* out, int64_t n, const NamedParameter& p, uint64_t seed) {
  const Init init = p.member->init;
  const CounterRandom random(seed, p.name);
  parallel_pieces(n, 4096, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) {
      const auto index = static_cast<uint64_t>(i);
      switch (init.kind) {
        case Init::Kind::zeros:
          out[i] = 0.f;
          break;
        case Init::Kind::ones:
          out[i] = 1.f;
          break;
        case Init::Kind::constant:
          out[i] = static_cast<float>(init.scale);
          break;
        case Init::Kind::normal:
          out[i] = static_cast<float>(init.scale * random.normal(index));
          break;
        case Init::Kind::uniform:
          out[i] = static_cast<float>(init.scale * (2.0 * random.uniform(index) - 1.0));
          break;
        case Init::Kind::dt_bias:
          out[i] = static_cast<float>(dt_bias_start(random.uniform(index)));
          break;
      }
    }
  });
}

}  // namespace

std::string Member::name_of(int64_t i) const {
  const size_t at = name.find("{}");
  return at == std::string::npos ? name : name.substr(0, at) + std::to_string(first + i) + name.substr(at + 2);
}

Member matrix_member(std::string name, int64_t rows, int64_t cols, Init init, Rule rule,
                     std::vector<int64_t> muon_blocks) {
  Member m;
  m.name = std::move(name);
  m.rows = rows;
  m.shape = {rows, cols};
  m.init = init;
  m.rule = rule;
  m.muon_blocks = muon_blocks.empty() ? std::vector<int64_t>{rows} : std::move(muon_blocks);
  return m;
}

Member vector_member(std::string name, int64_t n, Init init, Rule rule) {
  Member m = matrix_member(std::move(name), 1, n, init, rule);
  m.shape = {n};
  return m;
}

Block* ParameterStore::declare(int64_t cols, std::vector<Member> members, bool keep_f32, bool trained) {
  return declare(Region::common, cols, std::move(members), keep_f32, trained);
}

Block* ParameterStore::declare_experts(int64_t cols, std::vector<Member> members) {
  return declare(Region::experts, cols, std::move(members), /*keep_f32=*/false, /*trained=*/true);
}

Block* ParameterStore::declare(Region region, int64_t cols, std::vector<Member> members, bool keep_f32, bool trained) {
  KESTREL_CHECK(!allocated(), "parameters are declared before they are allocated");
  Block& b = blocks_.emplace_back();
  b.region = region;
  b.cols = cols;
  b.keep_f32 = keep_f32;
  b.trained = trained;
  b.members = std::move(members);
  for (Member& m : b.members) {
    m.block = &b;
    if (m.row_stride == 0) {  // follows the member before it
      m.row = b.rows;
      m.row_stride = m.rows;
      b.rows += m.rows * m.count;
    } else {  // a family interleaved with others: `row` is set by the caller
      b.rows = std::max(b.rows, m.row + m.row_stride * (m.count - 1) + m.rows);
    }
  }
  int64_t numel = 0;
  if (__builtin_mul_overflow(b.rows, b.cols, &numel) || numel > kMostElements - elements() - kBlockAlignment) {
    throw ConfigError(text("the model is too large: with ", b.members[0].name, ", a block of ", b.rows, " x ", b.cols,
                           ", it has more than 2^55 parameters. Lower model.hidden_size, the widths of its layers, ",
                           "model.num_experts or model.num_hidden_layers."));
  }
  int64_t& end = elements_[static_cast<size_t>(region)];
  b.offset = end;
  end += (numel + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  return &b;
}

void ParameterStore::allocate(Device device, DType working, bool gradients, bool sums) {
  KESTREL_CHECK(!allocated(), "parameters are allocated once");
  working_ = working;
  const bool split = working != DType::f32;
  const int64_t bytes =
      elements() * (4 + (gradients ? 4 : 0) + (split ? size_of(working) : 0) + (sums ? 8 : 0)) + 4 * 256;
  KESTREL_CHECK(!sums || (gradients && device == Device::cpu), "gradients are summed in fp64 on the CPU alone");
  memory_ = std::make_unique<Arena>(device, bytes);
  const Tensor master = memory_->keep({elements()}, DType::f32, "master weights");
  if (gradients) gradients_ = memory_->keep({elements()}, DType::f32, "gradients");
  if (sums) sums_ = memory_->keep({elements()}, DType::f64, "gradients");
  Tensor work = split ? memory_->keep({elements()}, working, "weights") : master;
  place(master, work, gradients_);
}

void ParameterStore::plan(Device device, DType working) {
  working_ = working;
  Arena planner = Arena::planner(device);
  const Tensor master = planner.keep({elements()}, DType::f32, "master weights");
  gradients_ = planner.keep({elements()}, DType::f32, "gradients");
  place(master, working == DType::f32 ? master : planner.keep({elements()}, working, "weights"), gradients_);
}

void ParameterStore::place(Tensor master, Tensor work, Tensor gradients) {
  masters_ = master;
  for (Block& b : blocks_) {
    const auto cut = [&](const Tensor& flat) {
      return region_of(flat, b.region).slice(b.offset, b.numel()).view({b.rows, b.cols});
    };
    b.master = cut(master);
    b.w = b.keep_f32 ? b.master : cut(work);
    if (gradients && b.trained) b.g = cut(gradients);
  }
}

void ParameterStore::initialize(uint64_t seed) {
  std::vector<float> host;
  for_each([&](const NamedParameter& p) {
    host.resize(static_cast<size_t>(p.member->rows * p.member->block->cols));
    fill(host.data(), static_cast<int64_t>(host.size()), p, seed);
    write(p, host.data());
  });
}

void ParameterStore::write(const NamedParameter& p, const float* host) {
  const Block& b = *p.member->block;
  const Tensor master = p.rows_of(b.master);
  Stream s(*memory_);
  upload(s, master, Tensor::of(host, {master.rows(), master.cols()}));
  if (b.w.data != b.master.data) copy_cast(s, p.rows_of(b.w), master);
  wait(s);
}

void ParameterStore::refresh_working(Stream& s) {
  for (const Block& b : blocks_) {
    if (b.w.data != b.master.data) copy_cast(s, b.w, b.master);
  }
}

void ParameterStore::zero_gradients(Stream& s) {
  fill_zero(s, gradients_);
  if (sums_) fill_zero(s, sums_);
}

namespace {

constexpr int64_t kFoldGrain = 1 << 16;

void fold(Stream& s, const Tensor& sums, const Tensor& gradients) {
  const OpRange range(s, "fold_gradients");
  double* sum = sums.as<double>();
  float* g = gradients.f32();
  parallel_pieces(gradients.numel(), kFoldGrain, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) {
      sum[i] += static_cast<double>(g[i]);
      g[i] = 0.f;
    }
  });
}

}  // namespace

void ParameterStore::fold_gradients(Stream& s) {
  if (sums_ && !s.planning()) fold(s, sums_, gradients_);
}

void ParameterStore::fold_gradients(Stream& s, const Block& b) {
  if (sums_ && !s.planning()) fold(s, gradient_sums(b.region).slice(b.offset, b.numel()), b.g.view({b.numel()}));
}

void ParameterStore::round_sums(Stream& s, Region r, int64_t begin, int64_t end) {
  const OpRange range(s, "round_sums");
  const double* sum = gradient_sums(r).as<double>();
  float* g = gradients(r).f32();
  parallel_pieces(end - begin, kFoldGrain, [&](int64_t a, int64_t b) {
    for (int64_t i = begin + a; i < begin + b; ++i) g[i] = static_cast<float>(sum[i]);
  });
}

void ParameterStore::for_each(const std::function<void(const NamedParameter&)>& fn) const {
  for (const Block& b : blocks_) {
    // Families of one block are walked side by side: experts.0.w1, experts.0.w3, experts.1.w1, ...
    int64_t most = 1;
    for (const Member& m : b.members) most = std::max(most, m.count);
    for (int64_t i = 0; i < most; ++i) {
      for (const Member& m : b.members) {
        if (i < m.count) fn({m.name_of(i), m.shape, &m, m.row + i * m.row_stride});
      }
    }
  }
}

void ParameterStore::for_each_elsewhere(const std::function<void(const std::string&)>& fn) const {
  for (const Block& b : blocks_) {
    for (const Member& m : b.members) {
      for (int64_t i = -m.first; i < m.family - m.first; ++i) {
        if (i < 0 || i >= m.count) fn(m.name_of(i));
      }
    }
  }
}

int64_t ParameterStore::trained_parameters() const {
  int64_t n = 0;
  for (const Block& b : blocks_) {
    if (b.trained) n += b.numel();
  }
  return n;
}

}  // namespace kestrel
