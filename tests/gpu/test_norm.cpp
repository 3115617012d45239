// The norms on the GPU against the CPU.
#include "gpu/support.h"
#include "kernels/norm/norm.h"

namespace kestrel::test {
namespace {

constexpr float kEps = 1e-5f;
constexpr DType kActivations[] = {DType::f32, DType::bf16};

struct Case {
  int64_t rows, heads, width, left, right;  // padding columns beside every matrix
};
// Every kernel: a half warp, a warp (2 and 8 packets), a block per row, and the loop for ragged, unaligned and very
// wide rows; with rows that fill no block and rows over many pieces.
constexpr Case kRows[] = {{1, 1, 1, 0, 0},     {3, 1, 8, 0, 0},     {5, 1, 127, 0, 0},    {7, 1, 128, 8, 16},
                          {7, 1, 128, 3, 0},   {33, 1, 512, 0, 8},  {9, 1, 768, 0, 0},    {1700, 1, 520, 0, 0},
                          {13, 1, 2048, 0, 0}, {5, 1, 2056, 0, 0},  {300, 1, 7168, 0, 0}, {3, 1, 8192, 0, 0},
                          {3, 1, 8200, 0, 0},  {30, 1, 1031, 0, 0}, {0, 1, 64, 0, 0}};
constexpr Case kHeads[] = {{1, 1, 1, 0, 0},     {5, 3, 7, 0, 0},    {9, 4, 64, 0, 0},
                           {301, 5, 128, 0, 0}, {33, 2, 128, 8, 8}, {33, 2, 128, 1, 0},
                           {17, 3, 256, 0, 0},  {5, 2, 520, 0, 0},  {0, 2, 64, 0, 0}};

std::string name(const Case& c, DType t) {
  return text(name_of(t), " ", c.rows, " x ", c.heads, " x ", c.width, " padded ", c.left, "+", c.right);
}

// Inputs on the host, rounded to the dtype under test.
struct Host {
  Buffer x, dy, gate, w, rstd, y, dx, dgate, dw;
  Host(const Case& c, DType t)
      : x({c.rows, c.heads * c.width}),
        dy({c.rows, c.heads * c.width}),
        gate({c.rows, c.heads * c.width}),
        w({c.width}),
        rstd({c.rows * c.heads}),
        y({c.rows, c.heads * c.width}),
        dx({c.rows, c.heads * c.width}),
        dgate({c.rows, c.heads * c.width}),
        dw({c.width}) {
    x.normal(1, 2.f);
    dy.normal(2);
    gate.normal(3, 3.f);
    w.normal(4, 0.3f, 1.f);
    dw.normal(5);
    for (const Buffer* b : {&x, &dy, &gate}) round_to(t, *b);
  }
};

// dw is a sum over rows of terms of either sign: F32 in another order, whatever the activations.
constexpr double kWeightBound = 2e-5;

TEST(GpuNorm, RmsNorm) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kRows) {
      SCOPED_TRACE(name(c, t));
      Host h(c, t);
      DeviceBuffer x(h.x, t, c.left, c.right), dy(h.dy, t, c.right, c.left), w(h.w->view({1, c.width}), DType::f32);
      DeviceBuffer y({c.rows, c.width}, t, c.right, c.left), rstd({c.rows}), dx({c.rows, c.width}, t, c.left, c.right);
      DeviceBuffer dw(h.dw->view({1, c.width}), DType::f32), dw2(h.dw->view({1, c.width}), DType::f32);
      DeviceBuffer dw3(h.dw->view({1, c.width}), DType::f32), dx2({c.rows, c.width}, t, c.left, c.right);
      const Tensor weight = w->view({c.width});
      cuda.run([&](Stream& s) { rms_norm_forward(s, y, rstd, x, weight, kEps); });
      cuda.run([&](Stream& s) { rms_norm_backward(s, dx, dw->view({c.width}), dy, x, weight, rstd); });
      rms_norm_forward(cpu, h.y, h.rstd, h.x, h.w, kEps);
      expect_close("y", y, h.y, tolerance(t));
      expect_close("rstd", rstd, h.rstd, 1e-6);
      Buffer dw0({c.width});
      dw0.copy(h.dw);
      rms_norm_backward(cpu, h.dx, h.dw, h.dy, h.x, h.w, h.rstd);
      if (c.width > 1) expect_close("dx", dx, h.dx, tolerance(t));  // one column: two terms that cancel up to eps
      expect_close("dw", dw, h.dw, kWeightBound);

      // The same bits again, and added to an F32 gradient.
      cuda.run([&](Stream& s) { rms_norm_backward(s, dx2, dw2->view({c.width}), dy, x, weight, rstd); });
      expect_same_bits("dx of two runs", dx, dx2);
      expect_same_bits("dw of two runs", dw, dw2);
      Buffer sum({c.rows, c.width});
      sum.normal(6);
      DeviceBuffer dsum(sum, DType::f32, c.left, c.right);
      cuda.run([&](Stream& s) { rms_norm_backward(s, dsum, dw3->view({c.width}), dy, x, weight, rstd, 1.f); });
      rms_norm_backward(cpu, sum, dw0, h.dy, h.x, h.w, h.rstd, 1.f);
      expect_close("dx added to", dsum, sum, tolerance(DType::f32));
      expect_close("dw", dw3, dw0, kWeightBound);
    }
  }
}

TEST(GpuNorm, RmsNormInPlace) {
  CudaStream cuda;
  for (const DType t : kActivations) {
    for (const Case& c : kRows) {
      SCOPED_TRACE(name(c, t));
      Host h(c, t);
      DeviceBuffer x(h.x, t, c.left, c.right), dy(h.dy, t, c.left, c.right), w(h.w->view({1, c.width}), DType::f32);
      DeviceBuffer y({c.rows, c.width}, t), rstd({c.rows}), dx({c.rows, c.width}, t), dw({c.width}), dw2({c.width});
      dw.zero();
      dw2.zero();
      const Tensor weight = w->view({c.width});
      cuda.run([&](Stream& s) {
        rms_norm_forward(s, y, rstd, x, weight, kEps);
        rms_norm_backward(s, dx, dw, dy, x, weight, rstd);
        rms_norm_backward(s, dy, dw2, dy, x, weight, rstd);
        rms_norm_forward(s, x, rstd, x, weight, kEps);
      });
      expect_same_bits("y in place of x", y, x);
      expect_same_bits("dx in place of dy", dx, dy);
    }
  }
}

TEST(GpuNorm, GatedRmsNorm) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kHeads) {
      SCOPED_TRACE(name(c, t));
      Host h(c, t);
      const int64_t C = c.heads * c.width;
      DeviceBuffer x(h.x, t, c.left, c.right), dy(h.dy, t, c.right, c.left), gate(h.gate, t, c.left, 0);
      DeviceBuffer w(h.w->view({1, c.width}), DType::f32), dw(h.dw->view({1, c.width}), DType::f32);
      DeviceBuffer y({c.rows, C}, t, c.right, c.left), rstd({c.rows, c.heads});
      DeviceBuffer dx({c.rows, C}, t, c.left, c.right), dgate({c.rows, C}, t, c.left, c.right);
      const Tensor weight = w->view({c.width});
      cuda.run([&](Stream& s) { gated_rms_norm_forward(s, y, rstd, x, gate, weight, kEps); });
      cuda.run(
          [&](Stream& s) { gated_rms_norm_backward(s, dx, dgate, dw->view({c.width}), dy, x, gate, weight, rstd); });
      gated_rms_norm_forward(cpu, h.y, h.rstd, h.x, h.gate, h.w, kEps);
      gated_rms_norm_backward(cpu, h.dx, h.dgate, h.dw, h.dy, h.x, h.gate, h.w, h.rstd);
      expect_close("y", y, h.y, tolerance(t));
      expect_close("rstd", rstd, h.rstd, 1e-6);
      if (c.width > 1) expect_close("dx", dx, h.dx, tolerance(t));  // one column: two terms that cancel up to eps
      expect_close("dgate", dgate, h.dgate, tolerance(t));
      expect_close("dw", dw, h.dw, kWeightBound);

      // In place: dx over dy, dgate over gate.
      DeviceBuffer dw2({c.width});
      dw2.zero();
      cuda.run([&](Stream& s) { gated_rms_norm_backward(s, dy, gate, dw2, dy, x, gate, weight, rstd); });
      expect_same_bits("dx in place", dy, dx);
      expect_same_bits("dgate in place", gate, dgate);
    }
  }
}

TEST(GpuNorm, L2Norm) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kRows) {
      SCOPED_TRACE(name(c, t));
      Host h(c, t);
      DeviceBuffer x(h.x, t, c.left, c.right), dy(h.dy, t, c.right, c.left);
      DeviceBuffer y({c.rows, c.width}, t, c.right, c.left), dx({c.rows, c.width}, t, c.left, c.right);
      cuda.run([&](Stream& s) {
        l2_norm_forward(s, y, x, 1e-6f);
        l2_norm_backward(s, dx, dy, x, 1e-6f);
      });
      l2_norm_forward(cpu, h.y, h.x, 1e-6f);
      l2_norm_backward(cpu, h.dx, h.dy, h.x, 1e-6f);
      expect_close("y", y, h.y, tolerance(t));
      if (c.width > 1) expect_close("dx", dx, h.dx, tolerance(t));  // one column: two terms that cancel up to eps
    }
  }
}

}  // namespace
}  // namespace kestrel::test
