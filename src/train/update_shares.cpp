#include "src/train/update_shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/parallel/device_sums.h"
#include "src/train/optimizer.h"

namespace kestrel {
namespace {

constexpr Region kRegions[] = {Region::common, Region::experts};

// What an update costs, in FLOPs.  AdamW moves 28 bytes an element: at the 4.1 TB/s and 600 TFLOP/s measured on an
// H200 the time of 4000 FLOPs; Muon's passes over an element beside its products are about as many bytes.
constexpr double kElementCost = 4000;

// Newton-Schulz of one [rows, cols] block: X X^T, its square and the product with X in each step.
double newton_schulz_cost(const OptimizerConfig& c, int64_t rows, int64_t cols) {
  const double m = static_cast<double>(std::min(rows, cols)), n = static_cast<double>(std::max(rows, cols));
  return static_cast<double>(c.newton_schulz_steps) * (4 * m * m * n + 2 * m * m * m);
}

// `count` units of `rows` rows, one after another from row `first` of a block; a cut may fall between them.
struct Units {
  int64_t first, rows, count;
  double cost;  // of one
};

// The units of a block by row: all its members, families side by side as one.
std::vector<Units> units_of(const OptimizerConfig& c, const Block& b) {
  std::vector<Units> out;
  for (const Member& m : b.members) {
    const Optimizer::Assignment a = Optimizer::assignment(c, m);
    const double element_cost = a.kind == Optimizer::Assignment::Kind::none ? 0 : kElementCost;
    Units u{m.row, 1, m.rows * m.count, element_cost * static_cast<double>(b.cols)};
    if (a.kind == Optimizer::Assignment::Kind::muon) {
      const std::vector<int64_t> pattern = c.per_head ? m.muon_blocks : std::vector<int64_t>{m.rows};
      const int64_t period = std::accumulate(pattern.begin(), pattern.end(), int64_t{0});
      u = {m.row, period, m.rows / period * m.count, element_cost * static_cast<double>(period * b.cols)};
      for (int64_t rows : pattern) u.cost += newton_schulz_cost(c, rows, b.cols);
    }
    if (m.row_stride > m.rows) {  // one of several families whose tensors alternate: a unit holds one of each
      if (m.row > 0) {
        out.back().cost += u.cost * static_cast<double>(u.count / m.count);
        continue;
      }
      u = {0, m.row_stride, m.count, u.cost * static_cast<double>(u.count / m.count)};
    }
    out.push_back(u);
  }
  std::sort(out.begin(), out.end(), [](const Units& x, const Units& y) { return x.first < y.first; });
  return out;
}

// Cut k lies at the unit border nearest to k shares of the whole cost.
std::vector<int64_t> cut(const ParameterStore& store, const OptimizerConfig& c, Region region, int64_t ranks) {
  double total = 0;
  const auto for_each_run = [&](auto&& fn) {
    for (const Block& b : store.blocks()) {
      if (b.region != region) continue;
      for (const Units& u : units_of(c, b)) fn(b, u);
    }
  };
  for_each_run([&](const Block&, const Units& u) { total += u.cost * static_cast<double>(u.count); });
  std::vector<int64_t> cuts{0};
  double done = 0;
  for_each_run([&](const Block& b, const Units& u) {
    while (static_cast<int64_t>(cuts.size()) < ranks) {
      const double wanted = total * static_cast<double>(cuts.size()) / static_cast<double>(ranks) - done;
      const int64_t units = u.cost > 0 ? std::max<int64_t>(std::llround(wanted / u.cost), 0) : u.count + 1;
      if (units >= u.count) break;
      cuts.push_back(b.offset + (u.first + units * u.rows) * b.cols);
    }
    done += u.cost * static_cast<double>(u.count);
  });
  cuts.resize(static_cast<size_t>(ranks) + 1, store.elements(region));
  return cuts;
}

}  // namespace

UpdateShares::UpdateShares(const ParameterStore& store) {
  for (const Region r : kRegions) cuts_[index(r)] = {0, store.elements(r)};
}

UpdateShares::UpdateShares(const ParameterStore& store, const OptimizerConfig& config, const Mesh& mesh)
    : UpdateShares(store, config, {mesh.world().size(), mesh.replicas().size()},
                   {mesh.world().rank(), mesh.replicas().rank()}) {
  mesh_ = &mesh;
}

UpdateShares::UpdateShares(const ParameterStore& store, const OptimizerConfig& config, std::array<int64_t, 2> ranks,
                           std::array<int64_t, 2> rank)
    : rank_(rank) {
  for (const Region r : kRegions) cuts_[index(r)] = cut(store, config, r, ranks[index(r)]);
}

UpdateShares::Rows UpdateShares::rows_of(const Block& b) const {
  const int64_t at = b.offset;
  const auto row = [&](int64_t element) { return std::clamp<int64_t>((element - at) / b.cols, 0, b.rows); };
  return {begin(b.region) > at ? row(begin(b.region)) : 0, end(b.region) > at ? row(end(b.region)) : 0};
}

void UpdateShares::sum_gradients(Stream& s, ParameterStore& store) const {
  for (const Region r : kRegions) {
    if (mesh_) reduce_scatter(s, ranks_of(r), store.has_sums() ? store.gradient_sums(r) : store.gradients(r), cuts(r));
    if (store.has_sums()) store.round_sums(s, r, begin(r), end(r));
  }
}

void UpdateShares::gather_masters(Stream& s, const ParameterStore& store) const {
  if (!mesh_) return;
  for (const Region r : kRegions) all_gather(s, ranks_of(r), store.masters(r), cuts(r));
}

}  // namespace kestrel
