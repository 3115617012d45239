// Loops over OpenMP threads whose results do not depend on how many threads there are.
#pragma once

#include <omp.h>

#include <cstdint>

namespace kestrel {

// Worth starting threads for.  One loop serves both cases, below: two copies of a body may round differently, since the
// compiler is free to fuse a multiplication and an addition in one and not in the other.
inline bool go_parallel(int64_t n) {
  return n > 1 && !omp_in_parallel() && omp_get_max_threads() > 1;
}

// fn(i) for i in [0, n); iterations must be independent and must not throw.  Serial inside another parallel region.
template <class F>
void parallel_for(int64_t n, F&& fn) {
#pragma omp parallel for schedule(static) if (go_parallel(n))
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// Same, for iterations of unequal cost.
template <class F>
void parallel_for_dynamic(int64_t n, F&& fn) {
#pragma omp parallel for schedule(dynamic, 1) if (go_parallel(n))
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// fn(begin, end) over [0, n) in pieces of `grain`: the pieces depend on n and grain only, so a reduction that keeps one
// partial per piece and sums them in piece order is the same for every thread count.  Piece p is [p grain, (p+1)
// grain).
template <class F>
void parallel_pieces(int64_t n, int64_t grain, F&& fn) {
  const int64_t pieces = (n + grain - 1) / grain;
  parallel_for(pieces, [&](int64_t p) { fn(p * grain, p * grain + grain < n ? p * grain + grain : n); });
}

}  // namespace kestrel
