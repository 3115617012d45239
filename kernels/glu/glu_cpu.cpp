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

template <class Unit>
void forward(const Unit unit, const Tensor& y, const Tensor& a, const Tensor& b, const float* row_scale) {
  float *out = y.f32(), *left = a.f32(), *right = b.f32();
  const int64_t F = a.cols();
  parallel_for(a.rows(), [&](int64_t n) {
    const float p = row_scale ? row_scale[n] : 1.f;
    const float *va = left + n * a.ld, *vb = right + n * b.ld;
    float* vy = out + n * y.ld;
#pragma omp simd
    for (int64_t c = 0; c < F; ++c) vy[c] = p * unit.value(va[c], vb[c]);
  });
}

template <class Unit>
void backward(const Unit unit, const Tensor& da, const Tensor& db, float* drow_scale, const Tensor& dy, const Tensor& a,
              const Tensor& b, const float* row_scale) {
  float *d_left = da.f32(), *d_right = db.f32(), *d_out = dy.f32(), *left = a.f32(), *right = b.f32();
  const int64_t F = a.cols();
  parallel_for(a.rows(), [&](int64_t n) {
    const float p = row_scale ? row_scale[n] : 1.f;
    const float *va = left + n * a.ld, *vb = right + n * b.ld, *vd = d_out + n * dy.ld;
    float *ga = d_left + n * da.ld, *gb = d_right + n * db.ld;
    float dp = 0.f;
#pragma omp simd reduction(+ : dp)
    for (int64_t c = 0; c < F; ++c) {
      const ValueSlope l = unit.left(va[c]), r = unit.right(vb[c]);
      const float d = vd[c], pd = p * d;
      dp += d * (l.value * r.value);
      ga[c] = pd * r.value * l.slope;
      gb[c] = pd * l.value * r.slope;
    }
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
  const int64_t D = o.cols();
  parallel_for(o.rows(), [&](int64_t n) {
    const float *vo = in + n * o.ld, *vg = g + n * gate.ld;
    float* vy = out + n * y.ld;
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) vy[c] = vo[c] * sigmoid_f(vg[c]);
  });
}

void sigmoid_gate_backward(const Tensor& d_o, const Tensor& dgate, const Tensor& dy, const Tensor& o,
                           const Tensor& gate) {
  float *d_in = d_o.f32(), *d_g = dgate.f32(), *d_out = dy.f32(), *in = o.f32(), *g = gate.f32();
  const int64_t D = o.cols();
  parallel_for(o.rows(), [&](int64_t n) {
    const float *vd = d_out + n * dy.ld, *vo = in + n * o.ld, *vg = g + n * gate.ld;
    float *go = d_in + n * d_o.ld, *gg = d_g + n * dgate.ld;
#pragma omp simd
    for (int64_t c = 0; c < D; ++c) {
      const ValueSlope s = sigmoid_slope(vg[c]);
      const float d = vd[c], x = vo[c];
      go[c] = d * s.value;
      gg[c] = d * x * s.slope;
    }
  });
}

}  // namespace kestrel::cpu
