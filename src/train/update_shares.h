// Which rank updates which parameters (ZeRO-1): each keeps the optimizer state of its share alone.
//
// A share is one interval of each region of the flat buffers (src/model/parameters.h): of the common region over all
// ranks, of the experts over the ranks that hold the same ones.  So the sum of the gradients is a reduce-scatter and
// the way back an all-gather, both over intervals.  Cuts fall between rows; never inside a matrix, or a head of one,
// that Muon orthogonalises.  Each share gets as near to the same cost as its last unit allows.
#pragma once

#include <array>
#include <vector>

#include "src/config/run_config.h"
#include "src/model/parameters.h"
#include "src/parallel/mesh.h"

namespace kestrel {

class UpdateShares {
 public:
  // One rank that updates everything.
  explicit UpdateShares(const ParameterStore& store);
  // The share of this rank; `mesh` must outlive it.
  UpdateShares(const ParameterStore& store, const OptimizerConfig& config, const Mesh& mesh);
  // The share of one rank of many, to plan with: `ranks` and `rank` by region.
  UpdateShares(const ParameterStore& store, const OptimizerConfig& config, std::array<int64_t, 2> ranks,
               std::array<int64_t, 2> rank);

  // The same deal as another rank has it.
  UpdateShares of_rank(std::array<int64_t, 2> rank) const {
    UpdateShares other = *this;
    other.rank_ = rank;
    return other;
  }

  // Elements of a region from its begin.
  int64_t begin(Region r) const { return cuts(r)[static_cast<size_t>(rank_[index(r)])]; }
  int64_t end(Region r) const { return cuts(r)[static_cast<size_t>(rank_[index(r)]) + 1]; }
  const std::vector<int64_t>& cuts(Region r) const { return cuts_[index(r)]; }
  // Rows [first, last) of a block.
  struct Rows {
    int64_t first = 0, last = 0;
    int64_t count() const { return last - first; }
  };
  Rows rows_of(const Block& b) const;

  // Collective.  The rank's share of the gradients is then their sum over micro-batches and ranks; the rest is left
  // undefined.
  void sum_gradients(Stream& s, ParameterStore& store) const;
  // Collective.  Everybody's share of the masters to everybody.
  void gather_masters(Stream& s, const ParameterStore& store) const;
  // Collective.
  double sum_of(double x) const { return mesh_ ? mesh_->world().sum_of(x) : x; }

 private:
  static size_t index(Region r) { return static_cast<size_t>(r); }
  Communicator& ranks_of(Region r) const { return r == Region::common ? mesh_->world() : mesh_->replicas(); }

  const Mesh* mesh_ = nullptr;
  std::array<std::vector<int64_t>, 2> cuts_;
  std::array<int64_t, 2> rank_{};
};

}  // namespace kestrel
