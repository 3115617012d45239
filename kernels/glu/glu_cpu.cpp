#include "kernels/glu/glu_cpu.h"

#include <cmath>

#include "kernels/core/math.h"
#include "kernels/core/parallel.h"

namespace kestrel::cpu {
namespace {

// A function and its derivative from one exponential; both keep full relative accuracy in the tails, where 1 - tanh^2
// and s (1 - s) formed from the rounded function would be noise.
struct ValueSlope {
  float value, slope;
};

inline ValueSlope sigmoid_slope(float x) {
  const float e = exp_f(-std::fabs(x));
  const float inverse = 1.f / (1.f + e);
  return {(x < 0.f ? e : 1.f) * inverse, e * inverse * inverse};
}

inline ValueSlope tanh_slope(float x) {
  const float e = exp_f(-2.f * std::fabs(x));
  const float inverse = 1.f / (1.f + e);
  return {tanh_f(x), 4.f * e * inverse * inverse};
}

inline ValueSlope silu_slope(float x) {
  const ValueSlope s = sigmoid_slope(x);
  return {x * s.value, s.value + x * s.slope};
}

// The two factors of a unit: left(a) right(b).
struct Situ {
  float beta, linear_beta, inverse_beta, inverse_linear_beta;
  explicit Situ(const Glu& g)
      : beta(g.beta),
        linear_beta(g.linear_beta),
        inverse_beta(1.f / g.beta),
        inverse_linear_beta(1.f / g.linear_beta) {}
  float value(float a, float b) const {
    return (beta * tanh_f(a * inverse_beta) * sigmoid_f(a)) * (linear_beta * tanh_f(b * inverse_linear_beta));
  }
  ValueSlope left(float a) const {
    const ValueSlope t = tanh_slope(a * inverse_beta), s = sigmoid_slope(a);
    return {beta * t.value * s.value, t.slope * s.value + beta * t.value * s.slope};
  }
  ValueSlope right(float b) const {
    const ValueSlope t = tanh_slope(b * inverse_linear_beta);
    return {linear_beta * t.value, t.slope};
  }
};

struct Silu {
  explicit Silu(const Glu&) {}
  float value(float a, float b) const { return silu_f(a) * b; }
  ValueSlope left(float a) const { return silu_slope(a); }
  ValueSlope right(float b) const { return {b, 1.f}; }
};

// The loops over a row are not inlined: parallel_for holds its body twice, serial and threaded, and two copies of the
// same arithmetic may be contracted into different fused multiply-adds.  One copy has the same bits for any number of
// threads.

template <class Unit>
[[gnu::noinline]] void forward_row(const Unit& unit, float* y, const float* a, const float* b, float p, int64_t F) {
#pragma omp simd
  for (int64_t c = 0; c < F; ++c) y[c] = p * unit.value(a[c], b[c]);
}

// Returns sum dy glu(a, b).
template <class Unit>
[[gnu::noinline]] float backward_row(const Unit& unit, float* da, float* db, const float* dy, const float* a,
                                     const float* b, float p, int64_t F) {
  float dp = 0.f;
#pragma omp simd reduction(+ : dp)
  for (int64_t c = 0; c < F; ++c) {
    const ValueSlope l = unit.left(a[c]), r = unit.right(b[c]);
    const float d = dy[c], pd = p * d;
    dp += d * (l.value * r.value);
    da[c] = pd * r.value * l.slope;
    db[c] = pd * l.value * r.slope;
  }
  return dp;
}

[[gnu::noinline]] void gate_row(float* y, const float* o, const float* gate, int64_t D) {
#pragma omp simd
  for (int64_t c = 0; c < D; ++c) y[c] = o[c] * sigmoid_f(gate[c]);
}

[[gnu::noinline]] void gate_backward_row(float* d_o, float* dgate, const float* dy, const float* o, const float* gate,
                                         int64_t D) {
#pragma omp simd
  for (int64_t c = 0; c < D; ++c) {
    const ValueSlope s = sigmoid_slope(gate[c]);
    const float d = dy[c], x = o[c];
    d_o[c] = d * s.value;
    dgate[c] = d * x * s.slope;
  }
}

template <class Unit>
void forward(const Unit& unit, const Tensor& y, const Tensor& a, const Tensor& b, const float* row_scale) {
  float *out = y.f32(), *left = a.f32(), *right = b.f32();
  parallel_for(a.rows(), [&](int64_t n) {
    const float p = row_scale ? row_scale[n] : 1.f;
    forward_row(unit, out + n * y.ld, left + n * a.ld, right + n * b.ld, p, a.cols());
  });
}

template <class Unit>
void backward(const Unit& unit, const Tensor& da, const Tensor& db, float* drow_scale, const Tensor& dy,
              const Tensor& a, const Tensor& b, const float* row_scale) {
  float *d_left = da.f32(), *d_right = db.f32(), *d_out = dy.f32(), *left = a.f32(), *right = b.f32();
  parallel_for(a.rows(), [&](int64_t n) {
    const float p = row_scale ? row_scale[n] : 1.f;
    const float dp = backward_row(unit, d_left + n * da.ld, d_right + n * db.ld, d_out + n * dy.ld, left + n * a.ld,
                                  right + n * b.ld, p, a.cols());
    if (drow_scale) drow_scale[n] = dp;
  });
}

}  // namespace

void glu_forward(const Glu& glu, const Tensor& y, const Tensor& a, const Tensor& b, const float* row_scale) {
  if (glu.kind == Glu::Kind::situ) return forward(Situ(glu), y, a, b, row_scale);
  forward(Silu(glu), y, a, b, row_scale);
}

void glu_backward(const Glu& glu, const Tensor& da, const Tensor& db, float* drow_scale, const Tensor& dy,
                  const Tensor& a, const Tensor& b, const float* row_scale) {
  if (glu.kind == Glu::Kind::situ) return backward(Situ(glu), da, db, drow_scale, dy, a, b, row_scale);
  backward(Silu(glu), da, db, drow_scale, dy, a, b, row_scale);
}

void sigmoid_gate_forward(const Tensor& y, const Tensor& o, const Tensor& gate) {
  float *out = y.f32(), *in = o.f32(), *g = gate.f32();
  parallel_for(o.rows(), [&](int64_t n) { gate_row(out + n * y.ld, in + n * o.ld, g + n * gate.ld, o.cols()); });
}

void sigmoid_gate_backward(const Tensor& d_o, const Tensor& dgate, const Tensor& dy, const Tensor& o,
                           const Tensor& gate) {
  float *d_in = d_o.f32(), *d_g = dgate.f32(), *d_out = dy.f32(), *in = o.f32(), *g = gate.f32();
  parallel_for(o.rows(), [&](int64_t n) {
    gate_backward_row(d_in + n * d_o.ld, d_g + n * dgate.ld, d_out + n * dy.ld, in + n * o.ld, g + n * gate.ld,
                      o.cols());
  });
}

}  // namespace kestrel::cpu
