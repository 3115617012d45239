// How the ranks of a run share the work: data x expert.
//
// World of W ranks, parallel.expert = P: rank = d P + p.  The P ranks of one d are neighbours (one host, where they
// can be) and hold the experts between them, E / P each; the W / P ranks of one p hold the same experts.  Every rank
// takes micro-batches of its own, so all other parameters have W replicas.
#pragma once

#include <memory>
#include <string>

#include "src/parallel/communicator.h"

namespace kestrel {

class Mesh {
 public:
  // ConfigError when `expert` does not divide the ranks.  `world` must outlive the mesh.
  Mesh(Communicator& world, int64_t expert);
  Communicator& world() const { return *world_; }
  Communicator& experts() const { return *experts_; }    // P ranks: this d
  Communicator& replicas() const { return *replicas_; }  // W / P ranks: this p
  bool is_root() const { return world_->is_root(); }

  // "4 ranks over MPI, 2 data x 2 expert: 0-1 on alpha, 2-3 on beta"; collective.
  std::string description() const;

 private:
  Communicator* world_;
  std::unique_ptr<Communicator> experts_, replicas_;
};

// The experts of one rank: E / ranks of them, from rank * E / ranks; `group` reaches the other ranks of an expert
// group.  Without a group of several ranks nothing can be run, only planned.
struct ExpertShare {
  int64_t rank = 0, ranks = 1;
  Communicator* group = nullptr;

  ExpertShare() = default;
  ExpertShare(int64_t r, int64_t n) : rank(r), ranks(n) {}
  explicit ExpertShare(const Mesh& mesh)
      : rank(mesh.experts().rank()), ranks(mesh.experts().size()), group(&mesh.experts()) {}

  int64_t count(int64_t experts) const { return experts / ranks; }
  int64_t first(int64_t experts) const { return rank * count(experts); }
};

}  // namespace kestrel
