// Rows of one micro-batch between the ranks of an expert group: out to the ranks that hold their experts and back.
//
// A rank sorts its (token, slot) pairs by expert over all E experts (kernels/experts/experts.h); the experts of one
// rank are neighbours, so the rows for a rank lie together.  Everybody tells everybody its counts by expert; from the
// matrix [ranks, E] each rank knows every size.  Received rows come by source rank, of each source by expert: one
// ragged group of rows for each source, and the products of one source do not depend on what the others send.  Nothing
// is dropped: a rank may get every row of its group.
//
// All functions are collective over the group; with one rank none of them is needed.  Over CUDA the rows are staged
// through host memory.
#pragma once

#include <vector>

#include "kernels/experts/experts.h"
#include "src/parallel/mesh.h"

namespace kestrel {

class ExpertExchange {
 public:
  ExpertExchange(const ExpertShare& share, int64_t experts) : share_(share), experts_(experts) {}

  bool alone() const { return share_.ranks == 1; }
  int64_t ranks() const { return share_.ranks; }
  int64_t first() const { return share_.first(experts_); }  // of the experts here
  int64_t count() const { return share_.count(experts_); }  // of the experts here

  // Where the rows of a micro-batch go, and what came here.
  struct Route {
    std::vector<int64_t> sent, received;  // rows to and from each rank
    std::vector<int64_t> counts;          // [ranks, experts here] of the received rows
    int64_t rows = 0;                     // received in all; on a planner the most there can be
    Tensor offsets;                       // I64 [ranks, experts here + 1]: of each source's rows, from its first
  };
  // From the sender's plan over all experts.  The caller gives the memory of `offsets`, and fills it next.
  Route route(Stream& s, const DispatchPlan& plan) const;
  void fill_offsets(Stream& s, const Route& r) const;

  // Rows (or scalars) [plan rows, c] by expert -> [route rows, c] where those experts are.
  void to_experts(Stream& s, const Route& r, Tensor out, Tensor rows) const;
  // The way back.
  void from_experts(Stream& s, const Route& r, Tensor rows, Tensor in) const;

 private:
  void exchange(Stream& s, const std::vector<int64_t>& to, const std::vector<int64_t>& from, Tensor out,
                Tensor in) const;

  ExpertShare share_;
  int64_t experts_;
};

}  // namespace kestrel
