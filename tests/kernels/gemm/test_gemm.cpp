#include "kernels/gemm/gemm.h"

#include "kernels/core/parallel.h"
#include "kernels/gemm/own_gemm.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;
using cpu::MicroKernels;
using cpu::Product;

namespace {

constexpr Trans kTrans[] = {Trans::no, Trans::yes};

// The product chosen for the CPU, put back when a test ends.
class Choose {
 public:
  explicit Choose(CpuGemm g) : before_(cpu_gemm()) { set_cpu_gemm(g); }
  ~Choose() { set_cpu_gemm(before_); }

 private:
  CpuGemm before_;
};

class Threads {
 public:
  explicit Threads(int n) : before_(omp_get_max_threads()) { omp_set_num_threads(n); }
  ~Threads() { omp_set_num_threads(before_); }

 private:
  int before_;
};

std::vector<CpuGemm> products() {
  return has_openblas() ? std::vector{CpuGemm::own, CpuGemm::openblas} : std::vector{CpuGemm::own};
}

std::vector<const MicroKernels*> kernel_sets() {
  std::vector<const MicroKernels*> sets{&cpu::base_kernels()};
  if (cpu::avx512_kernels()) sets.push_back(cpu::avx512_kernels());
  return sets;
}

// A random problem whose operands lie in wider matrices: `gap` floats of NaN after every row.
struct Problem {
  Problem(Trans ta, Trans tb, int64_t M, int64_t N, int64_t K, int64_t gap, float alpha, float beta)
      : a({ta == Trans::no ? M : K, (ta == Trans::no ? K : M) + gap}),
        b({tb == Trans::no ? K : N, (tb == Trans::no ? N : K) + gap}),
        before({M, N + gap}),
        c({M, N + gap}) {
    fill(a, gap, 1);
    fill(b, gap, 2);
    if (beta != 0.f) fill(before, gap, 3);  // otherwise C holds NaN and must not be read
    c.copy(before);
    p = {ta, tb, M, N, K, alpha, a.f(), a->ld, b.f(), b->ld, beta, c.f(), c->ld};
  }
  static void fill(Buffer& x, int64_t gap, uint64_t seed) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> d;
    for (int64_t r = 0; r < x->rows(); ++r)
      for (int64_t j = 0; j < x->cols() - gap; ++j) x[r * x->ld + j] = d(rng);
  }

  // Every element against fp64; returns false (after naming the element) at the first that is too far off.
  bool right() const {
    for (int64_t i = 0; i < p.M; ++i) {
      for (int64_t j = 0; j < p.N; ++j) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < p.K; ++k) {
          const double x = p.ta == Trans::no ? p.A[i * p.lda + k] : p.A[k * p.lda + i];
          const double y = p.tb == Trans::no ? p.B[k * p.ldb + j] : p.B[j * p.ldb + k];
          sum += x * y;
          size += std::fabs(x * y);
        }
        sum *= p.alpha;
        size *= std::fabs(p.alpha);
        if (p.beta != 0.f) {
          const double old = p.beta * static_cast<double>(before[i * p.ldc + j]);
          sum += old;
          size += std::fabs(old);
        }
        // The bound that any order of K additions and the final scaling keeps: (K + 3) roundings of at most `size`.
        const double bound = static_cast<double>(p.K + 3) * 6e-8 * size;
        if (!(std::fabs(c[i * p.ldc + j] - sum) <= bound)) {
          ADD_FAILURE() << "C[" << i << "," << j << "] = " << c[i * p.ldc + j] << ", expected " << sum << " +- "
                        << bound << " at M N K = " << p.M << " " << p.N << " " << p.K << " ta " << int(p.ta) << " tb "
                        << int(p.tb) << " alpha " << p.alpha << " beta " << p.beta;
          return false;
        }
      }
    }
    return true;
  }
  std::vector<char> bits() const {
    const char* at = static_cast<const char*>(c->data);
    return {at, at + c->bytes()};
  }
  void reset() { c.copy(before); }

  Buffer a, b, before, c;
  Product p;
};

struct Shape {
  int64_t M, N, K;
};
// Ones, primes, tile edges (6, 12, 16, 32), block edges (192 rows, 256 deep), and more than one column block (2048).
const Shape kShapes[] = {{1, 1, 1},    {1, 7, 3},     {2, 33, 65},   {3, 1, 5},     {5, 16, 17},   {6, 16, 8},
                         {7, 17, 16},  {12, 32, 64},  {13, 31, 257}, {16, 16, 16},  {64, 64, 16},  {31, 97, 53},
                         {193, 15, 9}, {200, 40, 30}, {17, 70, 513}, {9, 2053, 11}, {25, 129, 256}};

void sgemm_all(const Product& p) {
  cpu::sgemm(p.ta, p.tb, p.M, p.N, p.K, p.alpha, p.A, p.lda, p.B, p.ldb, p.beta, p.C, p.ldc);
}
void sgemm_one(const Product& p) {
  cpu::sgemm_serial(p.ta, p.tb, p.M, p.N, p.K, p.alpha, p.A, p.lda, p.B, p.ldb, p.beta, p.C, p.ldc);
}

}  // namespace

TEST(Gemm, EveryKernelSetMatchesFloat64) {
  for (const MicroKernels* set : kernel_sets()) {
    for (const Shape& n : kShapes) {
      for (const Trans ta : kTrans) {
        for (const Trans tb : kTrans) {
          for (const auto& [alpha, beta] : {std::pair{1.f, 0.f}, std::pair{1.f, 1.f}, std::pair{-0.7f, 0.3f}}) {
            for (const int64_t gap : {0, 5}) {
              Problem q(ta, tb, n.M, n.N, n.K, gap, alpha, beta);
              cpu::own_serial(*set, q.p);
              ASSERT_TRUE(q.right()) << set->name;
            }
          }
        }
      }
    }
  }
}

TEST(Gemm, EveryProductMatchesFloat64) {
  for (const CpuGemm g : products()) {
    const Choose choose(g);
    for (const Shape& n : {Shape{1, 7, 3}, Shape{7, 17, 16}, Shape{130, 257, 61}, Shape{300, 70, 520}}) {
      for (const Trans ta : kTrans) {
        for (const Trans tb : kTrans) {
          for (const auto& [alpha, beta] : {std::pair{1.f, 0.f}, std::pair{-0.7f, 0.3f}}) {
            Problem q(ta, tb, n.M, n.N, n.K, 3, alpha, beta);
            sgemm_all(q.p);
            ASSERT_TRUE(q.right()) << cpu_gemm_description();
          }
        }
      }
    }
  }
}

TEST(Gemm, BitsDoNotDependOnThreadsNorOnTheKernelSet) {
  const Choose own(CpuGemm::own);
  // Large enough to be shared out among threads; {2, ...} takes the dot products when B is transposed.
  for (const Shape& n : {Shape{97, 131, 300}, Shape{2, 1031, 515}, Shape{1, 700, 1000}, Shape{700, 19, 64}}) {
    for (const Trans ta : kTrans) {
      for (const Trans tb : kTrans) {
        Problem q(ta, tb, n.M, n.N, n.K, 1, 0.9f, 0.4f);
        cpu::own_serial(cpu::base_kernels(), q.p);
        const auto expected = q.bits();
        for (const MicroKernels* set : kernel_sets()) {
          for (const int threads : {1, 2, 3, 7}) {
            const Threads use(threads);
            q.reset();
            cpu::own_parallel(*set, q.p);
            ASSERT_EQ(q.bits(), expected) << set->name << " " << threads << " threads";
          }
        }
        q.reset();
        sgemm_one(q.p);
        ASSERT_EQ(q.bits(), expected);
        q.reset();
        sgemm_all(q.p);
        ASSERT_EQ(q.bits(), expected);
      }
    }
  }
}

TEST(Gemm, OpenblasBitsDoNotDependOnThreads) {
  if (!has_openblas()) GTEST_SKIP() << "built without OpenBLAS";
  const Choose choose(CpuGemm::openblas);
  Problem q(Trans::no, Trans::yes, 300, 260, 130, 0, 1.f, 0.f);
  sgemm_all(q.p);
  const auto expected = q.bits();
  for (const int threads : {1, 2, 3}) {
    const Threads use(threads);
    q.reset();
    sgemm_all(q.p);
    EXPECT_EQ(q.bits(), expected) << threads << " threads";
  }
}

TEST(Gemm, InsideAParallelLoopTheOwnProductServes) {
  for (const CpuGemm g : products()) {
    const Choose choose(g);
    Problem q(Trans::no, Trans::yes, 90, 70, 110, 0, 1.f, 0.f);
    sgemm_one(q.p);
    const auto expected = q.bits();
    Buffer other({90, 70});
    Product second = q.p;
    second.C = other.f();
    q.reset();
    const Threads use(2);
    parallel_for(2, [&](int64_t i) { sgemm_all(i == 0 ? q.p : second); });
    EXPECT_EQ(q.bits(), expected);
    EXPECT_EQ(std::memcmp(other.f(), expected.data(), expected.size()), 0);
  }
}

TEST(Gemm, SizesOfZero) {
  for (const CpuGemm g : products()) {
    const Choose choose(g);
    for (const Trans ta : kTrans) {
      for (const Trans tb : kTrans) {
        Buffer c({2, 3});
        for (int i = 0; i < 6; ++i) c[i] = static_cast<float>(i);
        cpu::sgemm(ta, tb, 0, 3, 4, 1.f, nullptr, 4, nullptr, 4, 0.f, c.f(), 3);
        cpu::sgemm(ta, tb, 2, 0, 4, 1.f, nullptr, 4, nullptr, 4, 0.f, c.f(), 3);
        EXPECT_EQ(c[4], 4.f);  // nothing to do
        cpu::sgemm(ta, tb, 2, 3, 0, 1.f, nullptr, 4, nullptr, 4, 0.5f, c.f(), 3);
        EXPECT_EQ(c[4], 2.f);  // K = 0 scales
        c[5] = std::nanf("");
        cpu::sgemm_serial(ta, tb, 2, 3, 0, 1.f, nullptr, 4, nullptr, 4, 0.f, c.f(), 3);
        for (int i = 0; i < 6; ++i) EXPECT_EQ(c[i], 0.f);
      }
    }
  }
}

TEST(Gemm, NonFiniteValuesStayInTheirRowAndColumn) {
  for (const MicroKernels* set : kernel_sets()) {
    for (const Trans ta : kTrans) {
      for (const Trans tb : kTrans) {
        Problem q(ta, tb, 15, 37, 20, 0, 1.f, 0.f);
        q.a[ta == Trans::no ? 4 * q.p.lda + 7 : 7 * q.p.lda + 4] = HUGE_VALF;
        q.b[tb == Trans::no ? 9 * q.p.ldb + 36 : 36 * q.p.ldb + 9] = std::nanf("");
        cpu::own_serial(*set, q.p);
        for (int64_t i = 0; i < 15; ++i)
          for (int64_t j = 0; j < 37; ++j)
            ASSERT_EQ(std::isfinite(q.c[i * 37 + j]), i != 4 && j != 36) << set->name << " " << i << " " << j;
      }
    }
  }
}

TEST(Gemm, LinearOnColumnBlocks) {
  CpuStream s;
  // x and y are column blocks of wider tensors, as the model cuts fused projections.
  Buffer wide_x({2, 5, 20}), wide_y({2, 5, 30}), w({7, 11});
  wide_x.normal(1);
  w.normal(2);
  const Tensor x = (*wide_x).columns(4, 11), y = (*wide_y).columns(9, 7);
  linear_forward(s, y, x, w);
  double worst = 0;
  for (int64_t r = 0; r < 10; ++r) {
    for (int64_t o = 0; o < 7; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < 11; ++i) sum += double(x.f32()[r * 20 + i]) * w[o * 11 + i];
      worst = std::max(worst, std::fabs(sum - y.f32()[r * 30 + o]));
    }
  }
  EXPECT_LE(worst, 1e-5);  // eleven products of size one, each rounded to 6e-8 of the sum
  EXPECT_TRUE(std::isnan(wide_y[8]) && std::isnan(wide_y[16]));  // the neighbours of the block are left alone

  Buffer dy({2, 5, 7}), dx({2, 5, 11}), dw({7, 11});
  dy.normal(3);
  dx.normal(4);
  dw.normal(5);
  const std::vector<float> dx0(dx.f(), dx.f() + 110), dw0(dw.f(), dw.f() + 77);
  linear_backward(s, dx, dw, dy, x, w, 0.5f);
  worst = 0;
  for (int64_t i = 0; i < 11; ++i) {
    for (int64_t r = 0; r < 10; ++r) {
      double sum = 0.5 * dx0[static_cast<size_t>(r * 11 + i)];
      for (int64_t o = 0; o < 7; ++o) sum += double(dy[r * 7 + o]) * w[o * 11 + i];
      worst = std::max(worst, std::fabs(sum - dx[r * 11 + i]));
    }
    for (int64_t o = 0; o < 7; ++o) {
      double sum = dw0[static_cast<size_t>(o * 11 + i)];
      for (int64_t r = 0; r < 10; ++r) sum += double(dy[r * 7 + o]) * x.f32()[r * 20 + i];
      worst = std::max(worst, std::fabs(sum - dw[o * 11 + i]));
    }
  }
  EXPECT_LE(worst, 1e-5);  // as above

  const float kept = dw[0];
  linear_backward(s, dx, Tensor(), dy, x, w);  // dx_beta = 0 overwrites; no dw
  EXPECT_EQ(dw[0], kept);
  double first = 0;
  for (int64_t o = 0; o < 7; ++o) first += double(dy[o]) * w[o * 11];
  EXPECT_NEAR(dx[0], first, 1e-5);  // as above
}

TEST(Gemm, BatchedEqualsALoop) {
  CpuStream s;
  const Choose own(CpuGemm::own);  // whose bits are the same however it is called
  // Shared out whole; each on all threads.
  for (const Shape& n : {Shape{9, 5, 7}, Shape{140, 130, 150}}) {
    for (const Trans ta : kTrans) {
      for (const Trans tb : kTrans) {
        Buffer a({3, ta == Trans::no ? n.M : n.K, ta == Trans::no ? n.K : n.M});
        Buffer b({3, tb == Trans::no ? n.K : n.N, tb == Trans::no ? n.N : n.K});
        Buffer c({3, n.M, n.N}), each({3, n.M, n.N});
        a.normal(1);
        b.normal(2);
        gemm_batched(s, c, a, ta, b, tb, 2.f);
        for (int64_t i = 0; i < 3; ++i) gemm(s, (*each)[i], (*a)[i], ta, (*b)[i], tb, 2.f);
        EXPECT_EQ(std::memcmp(c.f(), each.f(), static_cast<size_t>(c->bytes())), 0);
      }
    }
  }
}

TEST(Gemm, PlanningTouchesNothing) {
  Arena plan = Arena::planner(Device::cpu);
  Stream s(plan);
  const Tensor a = s.temp({8, 4}), b = s.temp({6, 4}), c = s.temp({8, 6});
  gemm(s, c, a, Trans::no, b, Trans::yes);
  linear_forward(s, c, a, b);
  linear_backward(s, a, b, c, a, b);
  const int64_t peak = plan.peak();
  gemm_batched(s, s.temp({2, 3, 3}), s.temp({2, 3, 3}), Trans::no, s.temp({2, 3, 3}), Trans::no);
  EXPECT_GT(plan.peak(), peak);
}

TEST(Gemm, RefusesWhatItCannotDo) {
  CpuStream s;
  Buffer a({4, 5}), b({6, 5}), c({4, 6}), half({4, 6}, DType::bf16);
  a.zero();
  b.zero();
  EXPECT_THROW(gemm(s, c, a, Trans::no, b, Trans::no), ContractError);
  EXPECT_THROW(gemm(s, a, a, Trans::no, b, Trans::yes), ContractError);
  EXPECT_THROW(gemm(s, half, a, Trans::no, b, Trans::yes), ContractError);
  EXPECT_THROW(gemm_batched(s, c, a, Trans::no, b, Trans::yes), ContractError);
}

TEST(Gemm, TheChoiceIsNamed) {
  {
    const Choose own(CpuGemm::own);
    EXPECT_EQ(cpu_gemm(), CpuGemm::own);
    EXPECT_EQ(cpu_gemm_description(), std::string("own ") + cpu::best_kernels().name + " GEMM");
  }
  if (has_openblas()) {
    const Choose other(CpuGemm::openblas);
    EXPECT_EQ(cpu_gemm_description().rfind("OpenBLAS 0.", 0), 0u) << cpu_gemm_description();
  } else {
    EXPECT_THROW(set_cpu_gemm(CpuGemm::openblas), ConfigError);
    EXPECT_EQ(cpu_gemm(), CpuGemm::own);
  }
}
