// Products on the GPU against the CPU.
#include "gpu/support.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_cuda.h"

namespace kestrel::test {
namespace {

struct Types {
  DType in, out;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
constexpr Trans kTrans[] = {Trans::no, Trans::yes};

struct Shape {
  int64_t M, N, K, left, right;  // padding columns beside every matrix
};
// Single elements, vectors, primes, tile multiples, and column blocks on and off 16-byte borders.
constexpr Shape kShapes[] = {{1, 1, 1, 0, 0},       {1, 7, 3, 0, 0},     {2, 33, 65, 3, 1},
                             {64, 64, 16, 8, 8},    {31, 97, 53, 0, 0},  {17, 70, 513, 1, 0},
                             {128, 256, 320, 0, 0}, {8, 1030, 40, 8, 0}, {257, 136, 64, 0, 5}};

std::string name(const Shape& c, Types t, Trans ta, Trans tb) {
  return text(name_of(t.in), " -> ", name_of(t.out), " M N K ", c.M, " ", c.N, " ", c.K, " padded ", c.left, "+",
              c.right, ta == Trans::yes ? " A^T" : "", tb == Trans::yes ? " B^T" : "");
}

// One random product: on the CPU, from operands rounded to the dtypes under test, and its operands on the device.
struct Problem {
  Buffer a, b, before, want;
  DeviceBuffer xa, xb;
  Problem(CpuStream& cpu, const Shape& c, Types t, Trans ta, Trans tb, float alpha, float beta)
      : a({ta == Trans::no ? c.M : c.K, ta == Trans::no ? c.K : c.M}),
        b({tb == Trans::no ? c.K : c.N, tb == Trans::no ? c.N : c.K}),
        before({c.M, c.N}),
        want({c.M, c.N}),
        xa({a->rows(), a->cols()}, t.in, c.left, c.right),
        xb({b->rows(), b->cols()}, t.in, c.right, c.left) {
    a.normal(1);
    b.normal(2);
    before.normal(3);
    round_to(t.in, a);
    round_to(t.in, b);
    round_to(t.out, before);
    want.copy(before);
    gemm(cpu, want, a, ta, b, tb, alpha, beta);
    xa.upload(a);
    xb.upload(b);
  }
};

// Sums of K products in fp32, then one rounding to the output's dtype.
void run_case(CudaStream& cuda, CpuStream& cpu, const Shape& c, Types t, Trans ta, Trans tb, float alpha, float beta,
              bool plain) {
  const Problem p(cpu, c, t, ta, tb, alpha, beta);
  DeviceBuffer xc({c.M, c.N}, t.out, c.left, 0), again({c.M, c.N}, t.out, c.left, 0);  // NaN where beta is 0
  for (DeviceBuffer* to : {&xc, &again}) {
    if (beta != 0.f) to->upload(p.before);
    cuda.run([&](Stream& s) {
      if (!plain) return gemm(s, *to, p.xa, ta, p.xb, tb, alpha, beta);
      if (s.planning()) return;
      const Tensor out = *to;
      cuda::GemmProblem g;
      g.ta = ta, g.tb = tb, g.M = c.M, g.N = c.N, g.K = c.K, g.alpha = alpha, g.beta = beta;
      g.a = p.xa->data, g.b = p.xb->data, g.c = out.data, g.lda = p.xa->ld, g.ldb = p.xb->ld, g.ldc = out.ld;
      g.in = t.in, g.out = t.out;
      cuda::gemm_plain(s, g);
    });
  }
  expect_close("c", xc, p.want, tolerance(t.out));
  expect_same_bits("c, computed again", xc, again);
}

TEST(GpuGemm, EveryDtypeTransposeAndAlignment) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Types t : kTypes) {
    for (const Shape& c : kShapes) {
      for (const Trans ta : kTrans) {
        for (const Trans tb : kTrans) {
          for (const auto& [alpha, beta] : {std::pair{1.f, 0.f}, std::pair{1.f, 1.f}, std::pair{-0.7f, 0.3f}}) {
            SCOPED_TRACE(text(name(c, t, ta, tb), " alpha ", alpha, " beta ", beta));
            run_case(cuda, cpu, c, t, ta, tb, alpha, beta, false);
          }
        }
      }
    }
  }
}

TEST(GpuGemm, ThePlainProductIsRightToo) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Types t : kTypes) {
    for (const Shape& c : kShapes) {
      for (const Trans ta : kTrans) {
        for (const Trans tb : kTrans) {
          SCOPED_TRACE(name(c, t, ta, tb));
          run_case(cuda, cpu, c, t, ta, tb, -0.7f, 0.3f, true);
        }
      }
    }
  }
}

TEST(GpuGemm, SizesOfZero) {
  CudaStream cuda;
  CpuStream cpu;
  for (const Types t : kTypes) {
    for (const Shape& c : {Shape{0, 5, 3, 0, 0}, Shape{5, 0, 3, 0, 0}, Shape{5, 4, 0, 0, 0}, Shape{70, 65, 0, 8, 0}}) {
      for (const float beta : {0.f, 0.5f}) {
        SCOPED_TRACE(text(name(c, t, Trans::no, Trans::no), " beta ", beta));
        run_case(cuda, cpu, c, t, Trans::no, Trans::no, 1.f, beta, false);
      }
    }
  }
}

TEST(GpuGemm, Batched) {
  CudaStream cuda;
  CpuStream cpu;
  struct Batch {
    int64_t n, M, N, K;
  };
  for (const Types t : kTypes) {
    for (const Batch& c : {Batch{1, 3, 5, 7}, Batch{7, 16, 24, 40}, Batch{3, 64, 64, 128}, Batch{2, 33, 9, 1}}) {
      for (const Trans ta : kTrans) {
        for (const Trans tb : kTrans) {
          SCOPED_TRACE(text(c.n, " times ", name({c.M, c.N, c.K, 0, 0}, t, ta, tb)));
          const bool at = ta == Trans::yes, bt = tb == Trans::yes;
          Buffer a({c.n, at ? c.K : c.M, at ? c.M : c.K}), b({c.n, bt ? c.N : c.K, bt ? c.K : c.N});
          Buffer want({c.n, c.M, c.N});
          a.normal(1);
          b.normal(2);
          want.normal(3);
          round_to(t.in, a);
          round_to(t.in, b);
          round_to(t.out, want);
          DeviceBuffer xa({c.n, a->dim(1), a->dim(2)}, t.in), xb({c.n, b->dim(1), b->dim(2)}, t.in);
          DeviceBuffer xc({c.n, c.M, c.N}, t.out);
          xa.upload(a);
          xb.upload(b);
          xc.upload(want);
          gemm_batched(cpu, want, a, ta, b, tb, 0.5f, 1.f);
          cuda.run([&](Stream& s) { gemm_batched(s, xc, xa, ta, xb, tb, 0.5f, 1.f); });
          expect_close("c", xc, want, tolerance(t.out));
        }
      }
    }
  }
}

// A layer: y, dx over what it held, dw added to an F32 gradient; also with the F32 gradient of a router's logits.
TEST(GpuGemm, LinearLayers) {
  CudaStream cuda;
  CpuStream cpu;
  struct Layer {
    int64_t N, in, out, pad;
  };
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const DType dy_type : {t, DType::f32}) {
      for (const Layer& c : {Layer{1, 1, 1, 0}, Layer{70, 33, 19, 0}, Layer{130, 64, 40, 8}, Layer{256, 128, 64, 0}}) {
        SCOPED_TRACE(text(name_of(t), " dy ", name_of(dy_type), " N ", c.N, " in ", c.in, " out ", c.out));
        Buffer x({c.N, c.in}), w({c.out, c.in}), dy({c.N, c.out}), y({c.N, c.out}), dx({c.N, c.in}), dw({c.out, c.in});
        x.normal(1);
        w.normal(2);
        dy.normal(3);
        dx.normal(4);
        dw.normal(5);
        for (const Buffer* b : {&x, &w, &dy, &dx}) round_to(t, *b);
        DeviceBuffer xx(x, t, c.pad, 0), xw(w, t), xdy(dy, dy_type, 0, c.pad), xy({c.N, c.out}, t, 0, c.pad);
        DeviceBuffer xdx(dx, t), xdw(dw, DType::f32);
        linear_forward(cpu, y, x, w);
        linear_backward(cpu, dx, dw, dy, x, w, 1.f);
        cuda.run([&](Stream& s) {
          linear_forward(s, xy, xx, xw);
          linear_backward(s, xdx, xdw, xdy, xx, xw, 1.f);
        });
        expect_close("y", xy, y, tolerance(t));
        expect_close("dx", xdx, dx, tolerance(t));
        expect_close("dw", xdw, dw, tolerance(DType::f32));
        EXPECT_EQ(cuda.scratch() > 0, dy_type != t);  // the rounded dy
      }
    }
  }
}

// A product of the model's size: cuBLAS against the plain product, both on the device.
TEST(GpuGemm, LargeProductsAgreeWithThePlainOne) {
  CudaStream cuda;
  const int64_t M = 1024, N = 2048, K = 2048;
  Buffer a({M, K}), b({N, K});
  a.normal(1);
  b.normal(2);
  for (const Types t : kTypes) {
    SCOPED_TRACE(text(name_of(t.in), " -> ", name_of(t.out)));
    DeviceBuffer xa(a, t.in), xb(b, t.in), xc({M, N}, t.out), plain({M, N}, t.out);
    cuda.run([&](Stream& s) {
      gemm(s, xc, xa, Trans::no, xb, Trans::yes);
      if (s.planning()) return;
      cuda::GemmProblem g;
      g.tb = Trans::yes, g.M = M, g.N = N, g.K = K, g.lda = g.ldb = K, g.ldc = N;
      g.a = xa->data, g.b = xb->data, g.c = plain->data, g.in = t.in, g.out = t.out;
      cuda::gemm_plain(s, g);
    });
    Buffer want({M, N});
    const std::vector<float> values = plain.values();
    std::copy(values.begin(), values.end(), want.f());
    // F32 operands: TF32 would be off by 3e-4.  BF16 operands: tensor cores truncate where they add, and 128 partial
    // sums of 16 products, each short by up to 2^-23 of itself, may come to 1.5e-5.
    const bool truncated = t.in == DType::bf16 && t.out == DType::f32;
    expect_close("c", xc, want, truncated ? 3e-5 : tolerance(t.out));
  }
}

}  // namespace
}  // namespace kestrel::test
