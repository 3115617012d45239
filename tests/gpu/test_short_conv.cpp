// The short convolution on the GPU against the CPU.
#include <random>

#include "gpu/support.h"
#include "kernels/core/elementwise.h"
#include "kernels/short_conv/short_conv.h"

namespace kestrel::test {
namespace {

constexpr DType kActivations[] = {DType::f32, DType::bf16};

struct Case {
  int64_t B, T, C, W, left, right;  // padding columns beside every matrix
  int documents;                    // 0: no document_start; n: documents of about n tokens
};
// Both vector widths, every number of taps the kernels have room for, strips of 32 and 128 tokens and their edges, rows
// shorter than the filter, documents of one token, more channels than a block takes.
constexpr Case kCases[] = {
    {1, 1, 1, 4, 0, 0, 0},      {2, 2, 8, 4, 0, 0, 0},       {1, 3, 5, 4, 0, 0, 2},       {3, 31, 16, 4, 8, 8, 0},
    {2, 32, 24, 4, 0, 0, 5},    {2, 33, 40, 4, 3, 2, 9},     {1, 127, 8, 4, 0, 8, 1},     {2, 128, 12, 4, 4, 0, 40},
    {2, 129, 520, 4, 0, 0, 30}, {1, 300, 1032, 4, 8, 16, 0}, {1, 131, 1536, 4, 0, 0, 60}, {1, 260, 8, 1, 0, 0, 7},
    {2, 140, 9, 2, 0, 0, 11},   {2, 135, 16, 3, 0, 0, 0},    {1, 150, 16, 5, 0, 0, 17},   {2, 134, 7, 8, 0, 0, 6},
    {1, 4, 6, 8, 1, 1, 0},      {0, 5, 8, 4, 0, 0, 0},       {2, 0, 8, 4, 0, 0, 0}};

std::string name(const Case& c, DType t) {
  return text(name_of(t), " B ", c.B, " T ", c.T, " C ", c.C, " W ", c.W, " padded ", c.left, "+", c.right,
              " documents ", c.documents);
}

void fill_documents(const Tensor& start, int mean, uint32_t seed) {
  std::mt19937 rng(seed);
  for (int64_t b = 0; b < start.rows(); ++b) {
    int32_t first = 0;
    for (int64_t t = 0; t < start.cols(); ++t) {
      if (t > 0 && rng() % static_cast<uint32_t>(mean) == 0) first = static_cast<int32_t>(t);
      start.i32()[b * start.ld + t] = first;
    }
  }
}

TEST(GpuShortConv, ForwardAndBackward) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(name(c, t));
      const int64_t N = c.B * c.T;
      Buffer x({N, c.C}), dy({N, c.C}), w({c.C, c.W}), y({N, c.C}), dx({N, c.C}), dw({c.C, c.W});
      Buffer start({c.B, c.T}, DType::i32);
      x.normal(1, 2.f);
      dy.normal(2);
      w.normal(3, 0.7f);
      dw.normal(4);
      round_to(t, x);
      round_to(t, dy);
      if (c.documents) fill_documents(start, c.documents, 5);
      const Tensor documents = c.documents ? *start : Tensor();

      DeviceBuffer xx(x, t, c.left, c.right), xdy(dy, t, c.right, c.left), xw(w, DType::f32), xstart(start, DType::i32);
      DeviceBuffer xy({N, c.C}, t, c.right, c.left), xdx({N, c.C}, t, c.left, c.right), xdw(dw, DType::f32);
      DeviceBuffer xdx2({N, c.C}, t, c.left, c.right), xdw2(dw, DType::f32);
      const Tensor xdocuments = c.documents ? *xstart : Tensor();
      cuda.run([&](Stream& s) { short_conv_forward(s, c.B, c.T, xy, xx, xw, xdocuments); });
      cuda.run([&](Stream& s) { short_conv_backward(s, c.B, c.T, xdx, xdw, xdy, xx, xw, xdocuments); });
      cuda.run([&](Stream& s) { short_conv_backward(s, c.B, c.T, xdx2, xdw2, xdy, xx, xw, xdocuments); });
      short_conv_forward(cpu, c.B, c.T, y, x, w, documents);
      short_conv_backward(cpu, c.B, c.T, dx, dw, dy, x, w, documents);
      expect_close("y", xy, y, tolerance(t));
      expect_close("dx", xdx, dx, tolerance(t));
      expect_close("dw", xdw, dw, 2e-5);  // a sum over all tokens in F32, in another order
      expect_same_bits("dx of two runs", xdx, xdx2);
      expect_same_bits("dw of two runs", xdw, xdw2);
    }
  }
}

// Token by token with the last inputs as history gives what the whole row gives.
TEST(GpuShortConv, HistoryContinuesARow) {
  CudaStream cuda;
  CpuStream cpu;
  const int64_t B = 3, T = 2, C = 24;
  for (const DType t : kActivations) {
    for (const int64_t W : {1, 2, 4, 7}) {
      for (const bool packed : {false, true}) {
        SCOPED_TRACE(text(name_of(t), " W ", W, packed ? " packed" : ""));
        Buffer x({B * T, C}), history({B * (W - 1), C}), w({C, W}), y({B * T, C}), start({B, T}, DType::i32);
        x.normal(1);
        history.normal(2);
        w.normal(3);
        round_to(t, x);
        round_to(t, history);
        const int32_t starts[B][T] = {{-100, -100}, {0, 0}, {-1, 1}};  // seen from the row's first token
        std::memcpy(start->data, starts, sizeof starts);
        const Tensor documents = packed ? *start : Tensor();
        short_conv_forward(cpu, B, T, y, x, w, documents, history);
        DeviceBuffer xx(x, t, 8, 0), xhistory(history, t), xw(w, DType::f32), xy({B * T, C}, t);
        DeviceBuffer xstart(start, DType::i32);
        cuda.run([&](Stream& s) { short_conv_forward(s, B, T, xy, xx, xw, packed ? *xstart : Tensor(), xhistory); });
        expect_close("y", xy, y, tolerance(t));
      }
    }
  }
}

}  // namespace
}  // namespace kestrel::test
