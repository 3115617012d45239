// Gated units on the GPU against the CPU.
#include "gpu/support.h"
#include "kernels/glu/glu.h"

namespace kestrel::test {
namespace {

constexpr DType kActivations[] = {DType::f32, DType::bf16};

struct Case {
  int64_t rows, cols, left, right;  // padding columns beside every matrix
  float scale;                      // standard deviation of a and b
};
// Whole packets and ragged widths, aligned and unaligned column blocks, one block and many; small inputs, where tanh is
// its series, and large ones, where everything saturates.
constexpr Case kCases[] = {{1, 1, 0, 0, 1.f},      {3, 7, 0, 0, 1.f},         {5, 64, 0, 64, 1.f},
                           {300, 136, 8, 16, 3.f}, {17, 264, 0, 0, 40.f},     {17, 264, 0, 0, .01f},
                           {9, 1000, 3, 5, 5.f},   {700, 1024, 0, 1024, 2.f}, {0, 8, 0, 0, 1.f}};

std::string name(const Case& c, DType t) {
  return text(name_of(t), " ", c.rows, " x ", c.cols, " padded ", c.left, "+", c.right, " scale ", c.scale);
}

TEST(GpuGlu, BothUnitsWithAndWithoutRowScale) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Glu::Kind kind : {Glu::Kind::situ, Glu::Kind::silu}) {
    Glu glu;
    glu.kind = kind;
    for (const DType t : kActivations) {
      for (const Case& c : kCases) {
        for (const bool scaled : {false, true}) {
          SCOPED_TRACE(text(name(c, t), kind == Glu::Kind::situ ? " situ" : " silu", scaled ? " scaled" : ""));
          Buffer a({c.rows, c.cols}), b({c.rows, c.cols}), dy({c.rows, c.cols}), y({c.rows, c.cols});
          Buffer da({c.rows, c.cols}), db({c.rows, c.cols}), p({c.rows}), dp({c.rows});
          a.normal(1, c.scale);
          b.normal(2, c.scale);
          dy.normal(3);
          p.normal(4, 0.5f, 1.f);
          for (const Buffer* x : {&a, &b, &dy}) round_to(t, *x);
          const Tensor row_scale = scaled ? *p : Tensor(), drow_scale = scaled ? *dp : Tensor();
          glu_forward(cpu, glu, y, a, b, row_scale);
          glu_backward(cpu, glu, da, db, drow_scale, dy, a, b, row_scale);

          DeviceBuffer xa(a, t, c.left, c.right), xb(b, t, c.right, c.left), xdy(dy, t, c.left, c.right);
          DeviceBuffer xy({c.rows, c.cols}, t, c.left, 0), xp(p->view({1, c.rows}), DType::f32), xdp({c.rows});
          DeviceBuffer xda({c.rows, c.cols}, t, c.left, c.right), xdb({c.rows, c.cols}, t, c.right, c.left);
          const Tensor scale = scaled ? xp->view({c.rows}) : Tensor(), dscale = scaled ? *xdp : Tensor();
          cuda.run([&](Stream& s) {
            glu_forward(s, glu, xy, xa, xb, scale);
            glu_backward(s, glu, xda, xdb, dscale, xdy, xa, xb, scale);
          });
          expect_close("y", xy, y, tolerance(t));
          expect_close("da", xda, da, tolerance(t));
          expect_close("db", xdb, db, tolerance(t));
          if (scaled) expect_close("drow_scale", xdp, dp, 1e-5);  // a sum in F32

          // In place: y over b, da over a, db over b.
          DeviceBuffer b2(b, t), a3(a, t), b3(b, t), dp3({c.rows});
          cuda.run([&](Stream& s) {
            glu_forward(s, glu, b2, xa, b2, scale);
            glu_backward(s, glu, a3, b3, scaled ? *dp3 : Tensor(), xdy, a3, b3, scale);
          });
          expect_same_bits("y in place", b2, xy);
          expect_same_bits("da in place", a3, xda);
          expect_same_bits("db in place", b3, xdb);
        }
      }
    }
  }
}

TEST(GpuGlu, SigmoidGate) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(name(c, t));
      Buffer o({c.rows, c.cols}), gate({c.rows, c.cols}), dy({c.rows, c.cols}), y({c.rows, c.cols});
      Buffer d_o({c.rows, c.cols}), dgate({c.rows, c.cols});
      o.normal(1);
      gate.normal(2, c.scale);
      dy.normal(3);
      for (const Buffer* x : {&o, &gate, &dy}) round_to(t, *x);
      sigmoid_gate_forward(cpu, y, o, gate);
      sigmoid_gate_backward(cpu, d_o, dgate, dy, o, gate);

      DeviceBuffer xo(o, t, c.left, c.right), xgate(gate, t, c.right, c.left), xdy(dy, t, c.left, c.right);
      DeviceBuffer xy({c.rows, c.cols}, t, c.left, 0);
      DeviceBuffer xd_o({c.rows, c.cols}, t, c.left, c.right), xdgate({c.rows, c.cols}, t, c.right, c.left);
      cuda.run([&](Stream& s) {
        sigmoid_gate_forward(s, xy, xo, xgate);
        sigmoid_gate_backward(s, xd_o, xdgate, xdy, xo, xgate);
      });
      expect_close("y", xy, y, tolerance(t));
      expect_close("d_o", xd_o, d_o, tolerance(t));
      expect_close("dgate", xdgate, dgate, tolerance(t));

      DeviceBuffer o2(o, t), dy3(dy, t), gate3(gate, t);
      cuda.run([&](Stream& s) {
        sigmoid_gate_forward(s, o2, o2, xgate);
        sigmoid_gate_backward(s, dy3, gate3, dy3, xo, gate3);
      });
      expect_same_bits("y in place", o2, xy);
      expect_same_bits("d_o in place", dy3, xd_o);
      expect_same_bits("dgate in place", gate3, xdgate);
    }
  }
}

}  // namespace
}  // namespace kestrel::test
