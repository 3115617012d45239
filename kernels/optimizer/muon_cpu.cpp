// Newton-Schulz and the Muon step.  4 m^2 n + 2 m^3 FLOP per step and matrix of short side m: bound by the products.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/core/parallel.h"
#include "kernels/gemm/gemm.h"
#include "kernels/optimizer/optimizer_cpu.h"
#include "kernels/optimizer/quintic.h"

namespace kestrel::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;

struct Slot {
  float *x, *y;  // [short, long]
  float *a, *b;  // [short, short]
};

Slot slot_of(const NewtonSchulzPlan& n, float* scratch, int64_t i) {
  float* at = scratch + i * n.floats_per_slot();
  const int64_t wide = n.short_side * n.long_side, gram = n.short_side * n.short_side;
  return {at, at + wide, at + 2 * wide, at + 2 * wide + gram};
}

// Every matrix of the call, in the slot it works in: many small ones on a thread each, or a large one on all threads.
template <class F>
void for_each_matrix(const NewtonSchulzPlan& plan, int64_t count, float* scratch, F&& fn) {
  if (plan.large) {
    for (int64_t i = 0; i < count; ++i) fn(i, slot_of(plan, scratch, 0));
    return;
  }
  parallel_for(std::min(plan.slots, count), [&](int64_t slot) {
    for (int64_t i = slot; i < count; i += plan.slots) fn(i, slot_of(plan, scratch, slot));
  });
}

// wide[r, c] of the slot against element (r, c), or (c, r) of a tall matrix: fn(wide element, index in the matrix).
// Cut into bands of rows of the matrix as it lies in memory.
template <class F>
void for_each_element(const NewtonSchulzPlan& n, float* wide, F&& fn) {
  constexpr int64_t kBand = 16;
  const bool tall = n.rows > n.cols;
  parallel_pieces(n.rows, kBand, [&](int64_t begin, int64_t end) {
    if (tall) {
      for (int64_t c = 0; c < n.cols; ++c)
        for (int64_t r = begin; r < end; ++r) fn(wide[c * n.long_side + r], r * n.cols + c);
    } else {
      for (int64_t i = begin * n.cols; i < end * n.cols; ++i) fn(wide[i], i);
    }
  });
}

void product(const NewtonSchulzPlan& plan, Trans tb, int64_t N, int64_t K, float alpha, const float* a, const float* b,
             float beta, float* c) {
  const auto f = plan.large ? sgemm : sgemm_serial;
  f(Trans::no, tb, plan.short_side, N, K, alpha, a, K, b, tb == Trans::yes ? K : N, beta, c, N);
}

void copy(int64_t n, const float* from, float* to) {
  parallel_pieces(n, kGrain, [=](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, sizeof(float) * static_cast<size_t>(end - begin));
  });
}

// NS of slot.x; the result is slot.x again (slot.y is swapped in as needed).
void iterate(const NewtonSchulzPlan& plan, Slot& s, int steps) {
  const int64_t m = plan.short_side, n = plan.long_side;
  // Normalised in the wide form, so that a matrix and its transpose go the same way to the last bit.
  const double inverse = 1.0 / (std::sqrt(sum_of_squares(m * n, s.x)) + kNormEps);
  parallel_pieces(m * n, kGrain, [x = s.x, inverse](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = static_cast<float>(x[i] * inverse);
  });
  for (int step = 0; step < steps; ++step) {
    product(plan, Trans::yes, m, n, 1.f, s.x, s.x, 0.f, s.a);
    copy(m * m, s.a, s.b);
    product(plan, Trans::no, m, m, kQuinticC, s.a, s.a, kQuinticB, s.b);
    copy(m * n, s.x, s.y);
    product(plan, Trans::no, n, m, 1.f, s.b, s.x, kQuinticA, s.y);
    std::swap(s.x, s.y);
  }
}

}  // namespace

NewtonSchulzPlan::NewtonSchulzPlan(int64_t count, int64_t r, int64_t c)
    : rows(r), cols(c), short_side(std::min(r, c)), long_side(std::max(r, c)) {
  constexpr int64_t kLarge = int64_t{1} << 21;   // multiply-adds of X X^T that pay for waking all threads
  constexpr int64_t kSlots = 64;                 // as many small matrices at once as threads may want, but no more
  constexpr int64_t kFloats = int64_t{1} << 22;  // scratch than 16 MiB
  large = short_side * short_side * long_side >= kLarge;
  const int64_t fit = std::clamp<int64_t>(kFloats / floats_per_slot(), 1, kSlots);
  slots = large ? 1 : std::min(std::max<int64_t>(count, 1), fit);
}

void newton_schulz(const NewtonSchulzPlan& plan, int64_t count, float* x, int steps, float* scratch) {
  for_each_matrix(plan, count, scratch, [&](int64_t i, Slot s) {
    float* mine = x + i * plan.rows * plan.cols;
    for_each_element(plan, s.x, [=](float& wide, int64_t at) { wide = mine[at]; });
    iterate(plan, s, steps);
    for_each_element(plan, s.x, [=](float& wide, int64_t at) { mine[at] = wide; });
  });
}

void muon(const NewtonSchulzPlan& plan, const Muon& h, int64_t count, int64_t block_stride, float* p, const float* g,
          float* m, float grad_scale, float* scratch) {
  const float mu = h.momentum, lr = h.lr, decay = h.weight_decay;
  const float scale = h.update_scale * std::sqrt(static_cast<float>(plan.long_side));
  const bool nesterov = h.nesterov;
  for_each_matrix(plan, count, scratch, [&](int64_t i, Slot s) {
    float *pi = p + i * block_stride, *mi = m + i * block_stride;
    const float* gi = g + i * block_stride;
    for_each_element(plan, s.x, [=](float& u, int64_t at) {
      const float grad = grad_scale * gi[at];
      mi[at] = mu * mi[at] + grad;
      u = nesterov ? grad + mu * mi[at] : mi[at];
    });
    iterate(plan, s, h.ns_steps);
    for_each_element(plan, s.x, [=](float& o, int64_t at) { pi[at] -= lr * (scale * o + decay * pi[at]); });
  });
}

}  // namespace kestrel::cpu
