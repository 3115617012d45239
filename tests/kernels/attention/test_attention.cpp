#include <omp.h>

#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/core/elementwise.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::Buffer;
using test::CpuStream;
using test::relative_error;

constexpr int64_t kArena = int64_t{64} << 20;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

struct Case {
  AttentionDims d;
  Buffer q, k, v, d_o, o, lse, dq, dk, dv, max_logit;
  explicit Case(const AttentionDims& dims)
      : d(dims),
        q({d.B * d.T, d.H * d.Dqk}),
        k({d.B * d.T, d.H * d.Dqk}),
        v({d.B * d.T, d.H * d.Dv}),
        d_o({d.B * d.T, d.H * d.Dv}),
        o({d.B * d.T, d.H * d.Dv}),
        lse({d.B, d.H, d.T}),
        dq({d.B * d.T, d.H * d.Dqk}),
        dk({d.B * d.T, d.H * d.Dqk}),
        dv({d.B * d.T, d.H * d.Dv}),
        max_logit({d.H}) {}
  void run(Tensor start = {}) {
    CpuStream s(kArena);
    for (int64_t h = 0; h < d.H; ++h) max_logit[h] = -1e30f;
    attention_forward(s, d, o, lse, q, k, v, start, max_logit);
    attention_backward(s, d, dq, dk, dv, d_o, o, lse, q, k, v, start);
  }
};

// The same in fp64, written from the definition with every score held.
struct Naive {
  Buffer o, lse, dq, dk, dv, max_logit;
  Naive(const Case& c, const int32_t* start)
      : o({c.o->dim(0), c.o->dim(1)}),
        lse({c.d.B, c.d.H, c.d.T}),
        dq({c.q->dim(0), c.q->dim(1)}),
        dk({c.q->dim(0), c.q->dim(1)}),
        dv({c.o->dim(0), c.o->dim(1)}),
        max_logit({c.d.H}) {
    for (int64_t h = 0; h < c.d.H; ++h) max_logit[h] = -1e30f;
    for (int64_t b = 0; b < c.d.B; ++b) {
      for (int64_t h = 0; h < c.d.H; ++h) head(c, start, b, h);
    }
  }
  void head(const Case& c, const int32_t* start, int64_t b, int64_t h) {
    const auto& d = c.d;
    const int64_t nqk = d.H * d.Dqk, nv = d.H * d.Dv;
    const size_t size = static_cast<size_t>(d.T * std::max(d.Dqk, d.Dv));
    std::vector<double> gq(size), gk(size), gv(size);
    const double scale = 1 / std::sqrt(static_cast<double>(d.Dqk));
    const auto at = [&](const Buffer& x, int64_t t, int64_t n, int64_t width, int64_t i) {
      return double{x[(b * d.T + t) * n + h * width + i]};
    };
    for (int64_t i = 0; i < d.T; ++i) {
      const int64_t first = start == nullptr ? 0 : start[b * d.T + i];
      std::vector<double> p(static_cast<size_t>(d.T)), dp(static_cast<size_t>(d.T));
      double m = -1e300, sum = 0, mean = 0;
      for (int64_t j = first; j <= i; ++j) {
        double s = 0;
        for (int64_t e = 0; e < d.Dqk; ++e) s += at(c.q, i, nqk, d.Dqk, e) * at(c.k, j, nqk, d.Dqk, e);
        p[static_cast<size_t>(j)] = s * scale;
        m = std::max(m, s * scale);
      }
      for (int64_t j = first; j <= i; ++j) sum += p[static_cast<size_t>(j)] = std::exp(p[static_cast<size_t>(j)] - m);
      lse[(b * d.H + h) * d.T + i] = static_cast<float>(m + std::log(sum));
      max_logit[h] = std::max(max_logit[h], static_cast<float>(m));
      for (int64_t e = 0; e < d.Dv; ++e) {
        double out = 0;
        for (int64_t j = first; j <= i; ++j) out += p[static_cast<size_t>(j)] / sum * at(c.v, j, nv, d.Dv, e);
        o[(b * d.T + i) * nv + h * d.Dv + e] = static_cast<float>(out);
      }
      for (int64_t j = first; j <= i; ++j) {
        const size_t js = static_cast<size_t>(j);
        p[js] /= sum;
        for (int64_t e = 0; e < d.Dv; ++e) {
          dp[js] += at(c.d_o, i, nv, d.Dv, e) * at(c.v, j, nv, d.Dv, e);
          gv[static_cast<size_t>(j * d.Dv + e)] += p[js] * at(c.d_o, i, nv, d.Dv, e);
        }
        mean += p[js] * dp[js];
      }
      for (int64_t j = first; j <= i; ++j) {
        const double ds = scale * p[static_cast<size_t>(j)] * (dp[static_cast<size_t>(j)] - mean);
        for (int64_t e = 0; e < d.Dqk; ++e) {
          gq[static_cast<size_t>(i * d.Dqk + e)] += ds * at(c.k, j, nqk, d.Dqk, e);
          gk[static_cast<size_t>(j * d.Dqk + e)] += ds * at(c.q, i, nqk, d.Dqk, e);
        }
      }
    }
    for (int64_t t = 0; t < d.T; ++t) {
      for (int64_t e = 0; e < d.Dqk; ++e) {
        dq[(b * d.T + t) * nqk + h * d.Dqk + e] = static_cast<float>(gq[static_cast<size_t>(t * d.Dqk + e)]);
        dk[(b * d.T + t) * nqk + h * d.Dqk + e] = static_cast<float>(gk[static_cast<size_t>(t * d.Dqk + e)]);
      }
      for (int64_t e = 0; e < d.Dv; ++e) {
        dv[(b * d.T + t) * nv + h * d.Dv + e] = static_cast<float>(gv[static_cast<size_t>(t * d.Dv + e)]);
      }
    }
  }
};

TEST(Attention, GoldenFixtures) {
  for (const char* name : {"attention", "attention_packed"}) {
    const auto f = test::fixture(name);
    const Tensor q = f.tensor("q"), v = f.tensor("v");
    Case c({q.dim(0), q.dim(1), q.dim(2), q.dim(3), v.dim(3)});
    c.q.copy(q);
    c.k.copy(f.tensor("k"));
    c.v.copy(v);
    c.d_o.copy(f.tensor("d_out"));
    Buffer start({c.d.B, c.d.T}, DType::i32);
    CpuStream s(kArena);
    if (f.has("segment")) document_starts(s, start, f.tensor("segment"));
    c.run(f.has("segment") ? *start : Tensor{});
    // golden limits of fp32: outputs 1e-5, gradients 1e-4
    EXPECT_LE(relative_error(c.o, f.tensor("out").view({c.d.B * c.d.T, c.d.H * c.d.Dv})), 1e-5) << name;
    EXPECT_LE(relative_error(c.dq, f.tensor("d_q").view({c.d.B * c.d.T, c.d.H * c.d.Dqk})), 1e-4) << name;
    EXPECT_LE(relative_error(c.dk, f.tensor("d_k").view({c.d.B * c.d.T, c.d.H * c.d.Dqk})), 1e-4) << name;
    EXPECT_LE(relative_error(c.dv, f.tensor("d_v").view({c.d.B * c.d.T, c.d.H * c.d.Dv})), 1e-4) << name;
  }
}

// Documents of irregular lengths: single tokens, one that ends on a tile border, one that spans tiles.
void cut_documents(int32_t* start, int64_t B, int64_t T) {
  const int64_t borders[] = {1, 2, 40, 64, 65, 129};
  for (int64_t b = 0; b < B; ++b) {
    int64_t first = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t x : borders) first = t == x + b ? t : first;
      start[b * T + t] = static_cast<int32_t>(first);
    }
  }
}

void compare(const Case& c, const int32_t* start, const std::string& what) {
  const Naive want(c, start);
  // fp32 sums of up to 200 terms against fp64: about 1e-6; cancellation in dS costs a digit
  EXPECT_LE(relative_error(c.o, want.o), 2e-6) << what;
  EXPECT_LE(relative_error(c.lse, want.lse), 2e-6) << what;
  EXPECT_LE(relative_error(c.max_logit, want.max_logit), 2e-6) << what;
  // with one visible key dq and dk are pure rounding: measured against the size of dv instead
  const double unit = std::sqrt(static_cast<double>(c.q->numel()));
  for (auto [got, ref] :
       {std::pair<const Buffer*, const Buffer*>{&c.dq, &want.dq}, {&c.dk, &want.dk}, {&c.dv, &want.dv}}) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < (*got)->numel(); ++i) {
      error += std::pow(double{(*got)[i]} - double{(*ref)[i]}, 2);
      norm += std::pow(double{(*ref)[i]}, 2);
    }
    EXPECT_LE(std::sqrt(error), 1e-5 * std::max(std::sqrt(norm), 0.1 * unit)) << what;
  }
}

TEST(Attention, EqualsTheDefinitionAtAwkwardShapes) {
  for (int64_t T : {1, 2, 63, 64, 65, 130, 200}) {
    for (bool packed : {false, true}) {
      Case c({2, T, 3, 17, 9});
      c.q.normal(1);
      c.k.normal(2);
      c.v.normal(3);
      c.d_o.normal(4);
      Buffer start({2, T}, DType::i32);
      cut_documents(start->i32(), 2, T);
      c.run(packed ? *start : Tensor{});
      compare(c, packed ? start->i32() : nullptr, text("T ", T, packed ? " packed" : ""));
    }
  }
}

TEST(Attention, OneDimensionAndOneHead) {
  Case c({1, 70, 1, 1, 1});
  c.q.normal(1);
  c.k.normal(2);
  c.v.normal(3);
  c.d_o.normal(4);
  c.run();
  compare(c, nullptr, "D 1");
}

// Scores in the hundreds: the maximum is taken out before the exponential, and later tiles may raise it.
TEST(Attention, LargeScores) {
  Case c({1, 150, 2, 8, 5});
  c.q.normal(1, 20.f);
  c.k.normal(2, 20.f);
  c.v.normal(3);
  c.d_o.normal(4);
  for (int64_t i = 0; i < 150 * 16; ++i) c.k[i] *= 1.f + static_cast<float>(i) / 800.f;  // grows along the sequence
  c.run();
  const Naive want(c, nullptr);
  // a score of 3000 carries 2e-4 of fp32 rounding into its exponential
  EXPECT_LE(relative_error(c.o, want.o), 5e-4);
  EXPECT_LE(relative_error(c.max_logit, want.max_logit), 1e-6);
  EXPECT_LE(relative_error(c.dv, want.dv), 5e-4);
}

TEST(Attention, MaxLogitIsOnlyRaised) {
  Case c({2, 80, 2, 4, 4});
  c.q.normal(1);
  c.k.normal(2);
  c.v.normal(3);
  c.d_o.normal(4);
  c.run();
  Buffer m({2});
  m[0] = 1e6f;
  m[1] = 0.f;
  CpuStream s(kArena);
  attention_forward(s, c.d, c.o, c.lse, c.q, c.k, c.v, {}, m);
  EXPECT_EQ(m[0], 1e6f);
  EXPECT_EQ(m[1], c.max_logit[1]);
  attention_forward(s, c.d, c.o, c.lse, c.q, c.k, c.v, {});  // and may be left out
}

// q, k, v and the gradients as blocks of columns of wider matrices.
TEST(Attention, ColumnBlocks) {
  const AttentionDims d{2, 70, 2, 6, 5};
  Case c(d);
  c.q.normal(1);
  c.k.normal(2);
  c.v.normal(3);
  c.d_o.normal(4);
  c.run();
  Buffer in({140, 12 + 12 + 10 + 3}), out({140, 50}), grad({140, 50});
  const Tensor q = in->columns(1, 12), k = in->columns(13, 12), v = in->columns(26, 10);
  const Tensor o = out->columns(2, 10), dout = out->columns(20, 10);
  const Tensor dq = grad->columns(0, 12), dk = grad->columns(14, 12), dv = grad->columns(30, 10);
  CpuStream s(kArena);
  copy_cast(s, q, c.q);
  copy_cast(s, k, c.k);
  copy_cast(s, v, c.v);
  copy_cast(s, dout, c.d_o);
  attention_forward(s, d, o, c.lse, q, k, v, {});
  attention_backward(s, d, dq, dk, dv, dout, o, c.lse, q, k, v, {});
  EXPECT_EQ(relative_error(o, c.o), 0);
  EXPECT_EQ(relative_error(dq, c.dq), 0);
  EXPECT_EQ(relative_error(dk, c.dk), 0);
  EXPECT_EQ(relative_error(dv, c.dv), 0);
  for (int64_t r = 0; r < 140; ++r) {
    for (int64_t col : {12, 13, 26, 29, 40, 49})
      EXPECT_TRUE(std::isnan(grad[r * 50 + col])) << "written between blocks";
  }
}

// A document's outputs and gradients are the same bits wherever else stands in the sequence.
TEST(Attention, DocumentsDoNotSeeEachOther) {
  const AttentionDims d{1, 192, 2, 8, 8};
  Case a(d), b(d);
  for (auto [buffer, other] : {std::pair<Buffer*, Buffer*>{&a.q, &b.q}, {&a.k, &b.k}, {&a.v, &b.v}, {&a.d_o, &b.d_o}}) {
    buffer->normal(7);
    other->normal(7);
    for (int64_t i = 0; i < 100 * 16; ++i) (*other)[i] += 3.f;  // the first document only
  }
  Buffer start({1, 192}, DType::i32);
  for (int64_t t = 0; t < 192; ++t) start->i32()[t] = t < 100 ? 0 : 100;
  a.run(start);
  b.run(start);
  for (auto [x, y] :
       {std::pair<const Buffer*, const Buffer*>{&a.o, &b.o}, {&a.dq, &b.dq}, {&a.dk, &b.dk}, {&a.dv, &b.dv}}) {
    EXPECT_EQ(std::memcmp(x->f() + 100 * 16, y->f() + 100 * 16, 92 * 16 * sizeof(float)), 0);
    EXPECT_NE(std::memcmp(x->f(), y->f(), 100 * 16 * sizeof(float)), 0);
  }
}

TEST(Attention, SameBitsForEveryThreadCountAndRun) {
  const int threads = omp_get_max_threads();
  Case first({2, 150, 2, 12, 7});
  for (int run = 0; run < 6; ++run) {
    omp_set_num_threads(run % 2 == 0 ? 1 : 2);
    Case c(first.d);
    for (Case* x : {&c, &first}) {
      x->q.normal(1);
      x->k.normal(2);
      x->v.normal(3);
      x->d_o.normal(4);
    }
    c.run();
    if (run == 0) first.run();
    EXPECT_TRUE(same_bits(c.o, first.o) && same_bits(c.lse, first.lse) && same_bits(c.max_logit, first.max_logit));
    EXPECT_TRUE(same_bits(c.dq, first.dq) && same_bits(c.dk, first.dk) && same_bits(c.dv, first.dv));
  }
  omp_set_num_threads(threads);
}

TEST(Attention, NoTokens) {
  Case c({2, 0, 2, 3, 3});
  c.run();
  EXPECT_EQ(c.max_logit[0], -1e30f);
}

TEST(Attention, RefusesWrongShapes) {
  Case c({1, 4, 2, 3, 3});
  CpuStream s(kArena);
  Buffer narrow({4, 5});
  EXPECT_THROW(attention_forward(s, c.d, c.o, c.lse, c.q, narrow, c.v, {}), ContractError);
  Buffer start({1, 3}, DType::i32);
  EXPECT_THROW(attention_forward(s, c.d, c.o, c.lse, c.q, c.k, c.v, start), ContractError);
}

TEST(Attention, PlanningTouchesNothing) {
  Arena plan = Arena::planner(Device::cpu);
  Stream s(plan);
  const AttentionDims d{2, 100, 3, 8, 4};
  const Tensor qk = plan.keep({200, 24}, DType::f32, "t"), v = plan.keep({200, 12}, DType::f32, "t");
  const Tensor lse = plan.keep({2, 3, 100}, DType::f32, "t");
  const int64_t kept = plan.peak();
  attention_forward(s, d, v, lse, qk, qk, v, {});
  attention_backward(s, d, qk, qk, v, v, v, lse, qk, qk, v, {});
  EXPECT_GE(plan.peak(), kept + 600 * 4) << "delta is counted";
  EXPECT_LE(plan.peak(), kept + 100 * 100 * 4) << "no matrix of scores";
}

TEST(Mla, AssembleAndItsTranspose) {
  const MlaDims d{21, 3, 5, 2, 4};
  Buffer wide({21, 40}), k({21, 21}), v({21, 12}), dk({21, 21}), dv({21, 12}), dwide({21, 40});
  wide.normal(1);
  dk.normal(2);
  dv.normal(3);
  const Tensor kv = wide->columns(2, 27), shared = wide->columns(31, 2);
  CpuStream s(kArena);
  mla_assemble_forward(s, d, k, v, kv, shared);
  for (int64_t n = 0; n < 21; ++n) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(k[n * 21 + h * 7 + i], kv.f32()[n * 40 + h * 9 + i]);
      for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(k[n * 21 + h * 7 + 5 + i], shared.f32()[n * 40 + i]);
      for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(v[n * 12 + h * 4 + i], kv.f32()[n * 40 + h * 9 + 5 + i]);
    }
  }
  const Tensor dkv = dwide->columns(1, 27), dshared = dwide->columns(30, 2);
  mla_assemble_backward(s, d, dkv, dshared, dk, dv);
  // <dk, k> + <dv, v> = <dkv, kv> + <dshared, shared>: the backward is the transpose
  double left = 0, right = 0;
  for (int64_t i = 0; i < 21 * 21; ++i) left += double{dk[i]} * double{k[i]};
  for (int64_t i = 0; i < 21 * 12; ++i) left += double{dv[i]} * double{v[i]};
  for (int64_t n = 0; n < 21; ++n) {
    for (int64_t i = 0; i < 27; ++i) right += double{dkv.f32()[n * 40 + i]} * double{kv.f32()[n * 40 + i]};
    for (int64_t i = 0; i < 2; ++i) {
      right += double{dshared.f32()[n * 40 + i]} * double{shared.f32()[n * 40 + i]};
      EXPECT_FLOAT_EQ(dshared.f32()[n * 40 + i], dk[n * 21 + 5 + i] + dk[n * 21 + 12 + i] + dk[n * 21 + 19 + i]);
    }
  }
  EXPECT_NEAR(left, right, 1e-4);  // sums of three fp32 terms each
}

// Decoding from latents gives what attention over expanded keys and values gives, for any cut into past and new.
TEST(Mla, DecodeEqualsExpandedAttention) {
  for (auto [S, H, nope, rope, dv, c] :
       {std::array<int64_t, 6>{150, 3, 8, 4, 6, 20}, {70, 40, 5, 3, 4, 9}, {9, 2, 7, 0, 3, 5}, {1, 1, 2, 1, 1, 3}}) {
    Buffer latent({S, c}), shared({S, rope}), kv_b({H * (nope + dv), c}), q({S, H * (nope + rope)});
    latent.normal(1);
    shared.normal(2);
    kv_b.normal(3, 0.5f);
    q.normal(4);
    Buffer kv({S, H * (nope + dv)}), k({S, H * (nope + rope)}), v({S, H * dv}), o({S, H * dv}), lse({1, H, S});
    for (int64_t n = 0; n < S; ++n) {
      for (int64_t r = 0; r < H * (nope + dv); ++r) {
        double sum = 0;
        for (int64_t i = 0; i < c; ++i) sum += double{latent[n * c + i]} * double{kv_b[r * c + i]};
        kv[n * H * (nope + dv) + r] = static_cast<float>(sum);
      }
    }
    const MlaDims d{S, H, nope, rope, dv};
    CpuStream s(kArena);
    mla_assemble_forward(s, d, k, v, kv, shared);
    attention_forward(s, {1, S, H, nope + rope, dv}, o, lse, q, k, v, {});
    for (int64_t past : {int64_t{0}, S / 2, S - 1}) {
      const int64_t M = S - past;
      Buffer got({M, H * dv});
      mla_decode(s, {M, H, nope, rope, dv}, past, got, q->slice(past, M), latent, shared, kv_b);
      // two orders of the same fp32 sums
      EXPECT_LE(relative_error(got, o->slice(past, M)), 5e-6) << "S " << S << " past " << past;
    }
  }
}

TEST(Mla, DecodeSameBitsForEveryThreadCount) {
  const MlaDims d{200, 7, 4, 2, 3};
  Buffer latent({200, 6}), shared({200, 2}), kv_b({49, 6}), q({200, 42}), one({200, 21}), two({200, 21});
  latent.normal(1);
  shared.normal(2);
  kv_b.normal(3);
  q.normal(4);
  const int threads = omp_get_max_threads();
  CpuStream s(kArena);
  omp_set_num_threads(1);
  mla_decode(s, d, 0, one, q, latent, shared, kv_b);
  omp_set_num_threads(2);
  mla_decode(s, d, 0, two, q, latent, shared, kv_b);
  omp_set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two));
}

}  // namespace
}  // namespace kestrel
