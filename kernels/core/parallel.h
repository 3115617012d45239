// Loops over OpenMP threads whose results do not depend on how many threads there are.
#pragma once

#include <omp.h>

#include <cstdint>
#include <exception>

namespace kestrel {

// fn(i) for i in [0, n); iterations must be independent.  Serial inside another parallel region.
template <class F>
void parallel_for(int64_t n, F&& fn) {
  if (n <= 1 || omp_in_parallel() || omp_get_max_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// Same, for iterations of unequal cost.
template <class F>
void parallel_for_dynamic(int64_t n, F&& fn) {
  if (n <= 1 || omp_in_parallel() || omp_get_max_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
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
