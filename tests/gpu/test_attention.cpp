// Attention and MLA's pieces on the GPU against the CPU.
#include <limits>

#include "gpu/support.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_cudnn.h"

namespace kestrel::test {
namespace {

struct Case {
  AttentionDims d;
  bool documents;
  int64_t left, right;  // padding columns beside every matrix
  float scale = 1.f;    // standard deviation of q and k
};

// Documents of irregular lengths: single tokens, one that ends on a tile border, one that spans tiles.
void cut_documents(int32_t* start, int64_t B, int64_t T) {
  const int64_t borders[] = {1, 2, 40, 64, 65, 129, 300};
  for (int64_t b = 0; b < B; ++b) {
    int64_t first = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t x : borders) first = t == x + b ? t : first;
      start[b * T + t] = static_cast<int32_t>(first);
    }
  }
}

// Inputs and what the CPU makes of them.
struct Host {
  Buffer q, k, v, d_o, o, lse, dq, dk, dv, max_logit, start;
  Host(CpuStream& cpu, const Case& c, DType t)
      : q({c.d.B * c.d.T, c.d.H * c.d.Dqk}),
        k({c.d.B * c.d.T, c.d.H * c.d.Dqk}),
        v({c.d.B * c.d.T, c.d.H * c.d.Dv}),
        d_o({c.d.B * c.d.T, c.d.H * c.d.Dv}),
        o({c.d.B * c.d.T, c.d.H * c.d.Dv}),
        lse({c.d.B, c.d.H, c.d.T}),
        dq({c.d.B * c.d.T, c.d.H * c.d.Dqk}),
        dk({c.d.B * c.d.T, c.d.H * c.d.Dqk}),
        dv({c.d.B * c.d.T, c.d.H * c.d.Dv}),
        max_logit({c.d.H}),
        start({c.d.B, c.d.T}, DType::i32) {
    q.normal(1, c.scale);
    k.normal(2, c.scale);
    v.normal(3);
    d_o.normal(4);
    for (const Buffer* b : {&q, &k, &v, &d_o}) round_to(t, *b);
    cut_documents(start->i32(), c.d.B, c.d.T);
    for (int64_t h = 0; h < c.d.H; ++h) max_logit[h] = h % 2 == 0 ? -std::numeric_limits<float>::infinity() : 2.5f;
    Buffer before({c.d.H});
    before.copy(max_logit);
    const Tensor documents = c.documents ? *start : Tensor();
    attention_forward(cpu, c.d, o, lse, q, k, v, documents, max_logit);
    attention_backward(cpu, c.d, dq, dk, dv, d_o, o, lse, q, k, v, documents);
    max_logit_before.assign(before.f(), before.f() + c.d.H);
  }
  std::vector<float> max_logit_before;
};

// The same on the device.
struct Device {
  DeviceBuffer q, k, v, d_o, o, lse, dq, dk, dv, max_logit, start;
  Device(const Case& c, const Host& h, DType t)
      : q(h.q, t, c.left, c.right),
        k(h.k, t, c.right, c.left),
        v(h.v, t, c.left, c.right),
        d_o(h.d_o, t, c.right, c.left),
        o({h.o->rows(), h.o->cols()}, t, c.left, c.right),
        lse({c.d.B, c.d.H, c.d.T}),
        dq({h.q->rows(), h.q->cols()}, t, c.right, c.left),
        dk({h.q->rows(), h.q->cols()}, t, c.left, c.right),
        dv({h.o->rows(), h.o->cols()}, t, c.right, c.left),
        max_logit({c.d.H}),
        start(h.start, DType::i32) {
    Buffer before({c.d.H});
    std::copy(h.max_logit_before.begin(), h.max_logit_before.end(), before.f());
    max_logit.upload(before);
  }
};

// BF16: the probabilities and their gradients are rounded to 8 bits before the products they enter, o and d_q.. after,
// and delta is formed from the rounded o; each adds 1.1e-3 in the mean square, those inside sums less.
double output_bound(DType t) {
  return t == DType::bf16 ? 4e-3 : 1e-5;
}
// Where the softmax is nearly one-hot (q and k of size 5), dP - delta cancels to the size of the rounding of o.
double gradient_bound(DType t, double scale = 1) {
  return t == DType::bf16 ? (scale > 1 ? 2e-2 : 8e-3) : 2e-5;
}

// With few visible keys dq and dk are differences that cancel: what is left is rounding of terms of the size of dv.
// So the bound is on the error relative to the larger of the gradient and a tenth of a standard normal matrix.
void expect_gradient(const char* name, const DeviceBuffer& got, const Tensor& want, double bound, double unit) {
  const std::vector<float> g = got.values();
  double error = 0, norm = 0;
  for (int64_t i = 0; i < want.numel(); ++i) {
    error += std::pow(double{g[static_cast<size_t>(i)]} - double{want.f32()[i]}, 2);
    norm += std::pow(double{want.f32()[i]}, 2);
  }
  const double floor = 0.1 * unit * std::sqrt(static_cast<double>(want.numel()));
  if (std::sqrt(norm) > floor) return expect_close(name, got, want, bound);
  EXPECT_LE(std::sqrt(error), bound * floor) << name << " " << got->describe() << ", of size " << std::sqrt(norm);
}

void compare(const Case& c, const Host& h, const Device& x, DType t) {
  expect_close("o", x.o, h.o, output_bound(t));
  const int64_t rows = c.d.B * c.d.H * c.d.T;
  expect_close("lse", x.lse, h.lse->view({1, rows}), 2e-5);  // F32 sums of D products; 2^x is good to 2 ulp
  expect_close("max_logit", x.max_logit, h.max_logit->view({1, c.d.H}), 2e-5);
  const double bound = gradient_bound(t, c.scale);
  expect_gradient("dq", x.dq, h.dq, bound, c.scale);
  expect_gradient("dk", x.dk, h.dk, bound, c.scale);
  expect_gradient("dv", x.dv, h.dv, bound, 1.f);
}

void forward_and_backward(Stream& s, const Case& c, const Device& x, bool own) {
  const Tensor documents = c.documents ? *x.start : Tensor();
  if (own) {
    cuda::own::attention_forward(s, c.d, x.o, x.lse, x.q, x.k, x.v, documents, x.max_logit);
    cuda::own::attention_backward(s, c.d, x.dq, x.dk, x.dv, x.d_o, x.o, x.lse, x.q, x.k, x.v, documents);
  } else {
    attention_forward(s, c.d, x.o, x.lse, x.q, x.k, x.v, documents, x.max_logit);
    attention_backward(s, c.d, x.dq, x.dk, x.dv, x.d_o, x.o, x.lse, x.q, x.k, x.v, documents);
  }
}

void expect_repeats(CudaStream& cuda, const Case& c, const Host& h, const Device& x, DType t, bool own) {
  const Device again(c, h, t);
  cuda.run([&](Stream& s) { forward_and_backward(s, c, again, own); });
  expect_same_bits("o again", x.o, again.o);
  expect_same_bits("lse again", x.lse, again.lse);
  expect_same_bits("max_logit again", x.max_logit, again.max_logit);
  expect_same_bits("dq again", x.dq, again.dq);
  expect_same_bits("dk again", x.dk, again.dk);
  expect_same_bits("dv again", x.dv, again.dv);
}

void run_case(CudaStream& cuda, CpuStream& cpu, const Case& c, DType t, bool own) {
  SCOPED_TRACE(text(name_of(t), own ? " own" : " public", " B ", c.d.B, " T ", c.d.T, " H ", c.d.H, " Dqk ", c.d.Dqk,
                    " Dv ", c.d.Dv, c.documents ? " documents" : "", " padded ", c.left, "+", c.right, " scale ",
                    c.scale));
  const Host h(cpu, c, t);
  const Device x(c, h, t);
  cuda.run([&](Stream& s) { forward_and_backward(s, c, x, own); });
  compare(c, h, x, t);
  expect_repeats(cuda, c, h, x, t, own);
}

// Widths of each padded size, on and off 16-byte borders.
TEST(GpuAttention, OwnKernelsAtEveryWidth) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const auto& [Dqk, Dv] :
         {std::pair{1, 1}, {17, 9}, {64, 64}, {72, 40}, {128, 128}, {129, 33}, {192, 128}, {40, 200}, {256, 256}}) {
      for (const bool documents : {false, true}) run_case(cuda, cpu, {{2, 150, 3, Dqk, Dv}, documents, 0, 0}, t, true);
    }
  }
}

// Lengths around the tiles of 64 keys and 128 queries.
TEST(GpuAttention, OwnKernelsAtEveryLength) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const int64_t T : {1, 2, 15, 63, 64, 65, 127, 128, 129, 200, 257, 400}) {
      for (const bool documents : {false, true}) run_case(cuda, cpu, {{2, T, 2, 24, 16}, documents, 0, 0}, t, true);
    }
  }
}

TEST(GpuAttention, OwnKernelsOnColumnBlocks) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : {DType::f32, DType::bf16}) {
    run_case(cuda, cpu, {{1, 140, 2, 192, 128}, true, 8, 16}, t, true);
    run_case(cuda, cpu, {{1, 140, 2, 192, 128}, false, 3, 1}, t, true);
    run_case(cuda, cpu, {{3, 70, 1, 20, 12}, true, 1, 4}, t, true);
  }
}

// Scores in the hundreds: the maximum is taken out before the exponential, and later tiles may raise it.  The softmax
// is then nearly one-hot and the gradients of q and k are what is left of differences.
TEST(GpuAttention, LargeScores) {
  CudaStream cuda;
  CpuStream cpu;
  run_case(cuda, cpu, {{1, 300, 2, 32, 16}, false, 0, 0, 5.f}, DType::bf16, true);
  run_case(cuda, cpu, {{1, 300, 2, 32, 16}, true, 0, 0, 5.f}, DType::bf16, true);
}

// Whatever serves: cuDNN where it can.
TEST(GpuAttention, PublicFunctions) {
  CudaStream cuda;
  CpuStream cpu;
  for (const int64_t T : {100, 128, 512}) {
    run_case(cuda, cpu, {{2, T, 3, 192, 128}, false, 0, 0}, DType::bf16, false);
  }
  for (const auto& [Dqk, Dv] : {std::pair{192, 128}, {128, 128}, {48, 32}}) {
    run_case(cuda, cpu, {{2, 200, 3, Dqk, Dv}, false, 8, 16}, DType::bf16, false);
    run_case(cuda, cpu, {{2, 200, 3, Dqk, Dv}, true, 0, 0}, DType::bf16, false);
  }
  run_case(cuda, cpu, {{2, 200, 3, 192, 128}, false, 0, 0}, DType::f32, false);
}

// The benchmark's sequence: cuDNN against the own kernels, and that it is cuDNN that serves it.
TEST(GpuAttention, CudnnServesTheModelsShapes) {
  if (!cuda::cudnn::available()) GTEST_SKIP() << cuda::cudnn::description();
  CudaStream cuda;
  const Case c{{2, 4096, 4, 192, 128}, false, 0, 0};
  const int64_t N = c.d.B * c.d.T;
  Buffer q({N, c.d.H * c.d.Dqk}), k({N, c.d.H * c.d.Dqk}), v({N, c.d.H * c.d.Dv}), d_o({N, c.d.H * c.d.Dv});
  q.normal(1);
  k.normal(2);
  v.normal(3);
  d_o.normal(4);
  DeviceBuffer xq(q, DType::bf16), xk(k, DType::bf16), xv(v, DType::bf16), xd_o(d_o, DType::bf16);
  struct Out {
    DeviceBuffer o, lse, dq, dk, dv;
    explicit Out(const Case& c_)
        : o({c_.d.B * c_.d.T, c_.d.H * c_.d.Dv}, DType::bf16),
          lse({c_.d.B, c_.d.H, c_.d.T}),
          dq({c_.d.B * c_.d.T, c_.d.H * c_.d.Dqk}, DType::bf16),
          dk({c_.d.B * c_.d.T, c_.d.H * c_.d.Dqk}, DType::bf16),
          dv({c_.d.B * c_.d.T, c_.d.H * c_.d.Dv}, DType::bf16) {}
  };
  const Out cudnn(c), own(c);
  const cuda::cudnn::Problem problem{c.d, xq, xk, xv, cudnn.o, false};
  EXPECT_TRUE(cuda::cudnn::serves_forward(problem, false)) << cuda::cudnn::description();
  EXPECT_TRUE(cuda::cudnn::serves_forward(problem, true)) << cuda::cudnn::description();
  EXPECT_TRUE(cuda::cudnn::serves_backward(problem, xd_o, cudnn.dq, cudnn.dk, cudnn.dv)) << cuda::cudnn::description();
  cuda.run([&](Stream& s) {
    attention_forward(s, c.d, cudnn.o, cudnn.lse, xq, xk, xv, {});
    attention_backward(s, c.d, cudnn.dq, cudnn.dk, cudnn.dv, xd_o, cudnn.o, cudnn.lse, xq, xk, xv, {});
    cuda::own::attention_forward(s, c.d, own.o, own.lse, xq, xk, xv, {}, {});
    cuda::own::attention_backward(s, c.d, own.dq, own.dk, own.dv, xd_o, own.o, own.lse, xq, xk, xv, {});
  });
  const auto compare_with_own = [](const char* name, const DeviceBuffer& got, const DeviceBuffer& want, double bound) {
    Buffer w({want->rows(), want->cols()});
    const std::vector<float> values = want.values();
    std::copy(values.begin(), values.end(), w.f());
    expect_close(name, got, w, bound);
  };
  compare_with_own("o", cudnn.o, own.o, 2 * output_bound(DType::bf16));  // both are rounded
  compare_with_own("lse", cudnn.lse, own.lse, 2e-5);
  compare_with_own("dq", cudnn.dq, own.dq, 2 * gradient_bound(DType::bf16));
  compare_with_own("dk", cudnn.dk, own.dk, 2 * gradient_bound(DType::bf16));
  compare_with_own("dv", cudnn.dv, own.dv, 2 * gradient_bound(DType::bf16));
}

// More heads than one slice of the backward takes: slices of sequences, and of heads.
TEST(GpuAttention, CudnnBackwardInSlices) {
  if (!cuda::cudnn::available()) GTEST_SKIP() << cuda::cudnn::description();
  const auto slice = [](int64_t B, int64_t T, int64_t H) {
    const cuda::cudnn::HeadSlice s = cuda::cudnn::backward_slice({B, T, H, 192, 128});
    return std::pair{s.batches, s.heads};
  };
  EXPECT_EQ(slice(8, 4096, 16), (std::pair{int64_t{2}, int64_t{16}}));  // 1 GiB
  EXPECT_EQ(slice(1, 16384, 16), (std::pair{int64_t{1}, int64_t{4}}));  // 2 GiB
  EXPECT_EQ(slice(1, 65536, 16), (std::pair{int64_t{0}, int64_t{0}}));  // 8 GiB for one head: the own kernels
  EXPECT_EQ(slice(2, 128, 1536), (std::pair{int64_t{1}, int64_t{768}}));
  CudaStream cuda;
  CpuStream cpu;
  run_case(cuda, cpu, {{2, 128, 1536, 16, 16}, false, 0, 0}, DType::bf16, false);
  run_case(cuda, cpu, {{3, 128, 700, 16, 16}, false, 0, 0}, DType::bf16, false);
}

TEST(GpuAttention, MlaAssemble) {
  CudaStream cuda;
  CpuStream cpu;
  struct Widths {
    int64_t H, nope, rope, v, left, right;
  };
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const int64_t N : {0, 1, 5, 300}) {
      for (const Widths& w : {Widths{16, 128, 64, 128, 8, 16}, Widths{3, 5, 3, 7, 1, 2}, Widths{2, 8, 0, 8, 0, 0},
                              Widths{1, 0, 4, 4, 0, 0}, Widths{4, 32, 16, 24, 0, 8}}) {
        SCOPED_TRACE(text(name_of(t), " N ", N, " H ", w.H, " nope ", w.nope, " rope ", w.rope, " v ", w.v));
        const MlaDims d{N, w.H, w.nope, w.rope, w.v};
        const int64_t nk = w.H * (w.nope + w.rope), nv = w.H * w.v, nkv = w.H * (w.nope + w.v);
        Buffer kv({N, nkv}), shared({N, w.rope}), k({N, nk}), v({N, nv}), dk({N, nk}), dv({N, nv}), dkv({N, nkv}),
            dshared({N, w.rope});
        kv.normal(1);
        shared.normal(2);
        dk.normal(3);
        dv.normal(4);
        for (const Buffer* b : {&kv, &shared, &dk, &dv}) round_to(t, *b);
        mla_assemble_forward(cpu, d, k, v, kv, shared);
        mla_assemble_backward(cpu, d, dkv, dshared, dk, dv);
        DeviceBuffer xkv(kv, t), xshared(shared, t, w.left, w.right), xk({N, nk}, t), xv({N, nv}, t);
        DeviceBuffer xdk(dk, t), xdv(dv, t), xdkv({N, nkv}, t), xdshared({N, w.rope}, t, w.right, w.left);
        cuda.run([&](Stream& s) {
          mla_assemble_forward(s, d, xk, xv, xkv, xshared);
          mla_assemble_backward(s, d, xdkv, xdshared, xdk, xdv);
        });
        expect_close("k", xk, k, 0.0);  // copies
        expect_close("v", xv, v, 0.0);
        expect_close("dkv", xdkv, dkv, 0.0);
        expect_close("dk_shared", xdshared, dshared, tolerance(t));
      }
    }
  }
}

struct DecodeCase {
  int64_t H, nope, rope, v, c, past, M, left, right;
};

// One token over a short and over a long cache (pieces), several tokens, every width of the kernel.
TEST(GpuAttention, MlaDecode) {
  CpuStream cpu(int64_t{256} << 20);
  CudaStream cuda;
  for (const DType t : {DType::f32, DType::bf16}) {
    for (const DecodeCase& k :
         {DecodeCase{2, 4, 4, 4, 8, 0, 1, 0, 0}, DecodeCase{3, 5, 3, 7, 13, 70, 1, 1, 2},
          DecodeCase{1, 0, 4, 4, 6, 3, 5, 0, 0}, DecodeCase{4, 8, 0, 8, 40, 257, 2, 0, 0},
          DecodeCase{16, 128, 64, 128, 512, 1500, 1, 0, 8}, DecodeCase{16, 128, 64, 128, 512, 100, 130, 8, 0},
          DecodeCase{2, 16, 32, 16, 1000, 300, 3, 0, 0}}) {
      SCOPED_TRACE(text(name_of(t), " H ", k.H, " nope ", k.nope, " rope ", k.rope, " v ", k.v, " c ", k.c, " past ",
                        k.past, " M ", k.M));
      const MlaDims d{k.M, k.H, k.nope, k.rope, k.v};
      const int64_t S = k.past + k.M;
      Buffer q({k.M, k.H * (k.nope + k.rope)}), latent({S, k.c}), shared({S, k.rope}),
          kv_b({k.H * (k.nope + k.v), k.c}), o({k.M, k.H * k.v});
      q.normal(1);
      latent.normal(2);
      shared.normal(3);
      kv_b.normal(4, 1 / std::sqrt(static_cast<float>(k.c)));
      for (const Buffer* b : {&q, &latent, &shared, &kv_b}) round_to(t, *b);
      mla_decode(cpu, d, k.past, o, q, latent, shared, kv_b);
      DeviceBuffer xq(q, t, k.left, k.right), xlatent(latent, t, k.right, k.left), xshared(shared, t, k.left, k.right),
          xkv_b(kv_b, t), xo({k.M, k.H * k.v}, t, k.right, k.left), again({k.M, k.H * k.v}, t, k.right, k.left);
      cuda.run([&](Stream& s) { mla_decode(s, d, k.past, xo, xq, xlatent, xshared, xkv_b); });
      cuda.run([&](Stream& s) { mla_decode(s, d, k.past, again, xq, xlatent, xshared, xkv_b); });
      // BF16: the mean of the latents is rounded before the last product, and the output after it.
      expect_close("o", xo, o, t == DType::bf16 ? 5e-3 : 1e-5);
      expect_same_bits("o", xo, again);
    }
  }
}

TEST(GpuAttention, DecodingWideLatentsIsRefusedWithTheWayOut) {
  CudaStream cuda;
  const MlaDims d{1, 2, 4, 4, 4};
  DeviceBuffer o({1, 8}), q({1, 16}), latent({1, 1149}), shared({1, 4}), kv_b({16, 1149});
  EXPECT_THROW(cuda.run([&](Stream& s) { mla_decode(s, d, 0, o, q, latent, shared, kv_b); }), ConfigError);
}

}  // namespace
}  // namespace kestrel::test
