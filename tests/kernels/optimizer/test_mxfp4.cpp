#include "kernels/core/parallel.h"
#include "kernels/optimizer/optimizer.h"
#include "tests/support.h"

using namespace kestrel;
using namespace kestrel::test;

namespace {

uint8_t* bytes(const Buffer& x) {
  return (*x).as<uint8_t>();
}

// Packs w, unpacks it, and checks that fake quantisation gives the same bits.
struct Packed {
  Packed(Stream& s, const Tensor& w)
      : codes({w.rows(), w.cols() / 2}, DType::u8),
        scale({w.rows(), w.cols() / 32}, DType::u8),
        values({w.rows(), w.cols()}),
        fake({w.rows(), w.cols()}) {
    mxfp4_pack(s, codes, scale, w);
    mxfp4_unpack(s, values, codes, scale);
    mxfp4_fake_quantize(s, fake, w);
    for (int64_t i = 0; i < values->numel(); ++i) {
      EXPECT_TRUE(values[i] == fake[i] || (std::isnan(values[i]) && std::isnan(fake[i])))
          << values[i] << " " << fake[i];
      EXPECT_TRUE(std::isnan(values[i]) || std::signbit(values[i]) == std::signbit(fake[i]));
    }
  }
  Buffer codes, scale, values, fake;
};

}  // namespace

TEST(Mxfp4, Fixture) {
  const auto f = fixture("mxfp4");
  CpuStream s;
  const Packed p(s, f.tensor("w"));
  EXPECT_EQ(std::memcmp(bytes(p.codes), f.tensor("weight_packed").data, static_cast<size_t>(p.codes->bytes())), 0);
  EXPECT_EQ(std::memcmp(bytes(p.scale), f.tensor("weight_scale").data, static_cast<size_t>(p.scale->bytes())), 0);
  for (int64_t i = 0; i < p.values->numel(); ++i) ASSERT_EQ(p.values[i], f.tensor("dequantized").f32()[i]);
}

TEST(Mxfp4, RoundsTiesToTheEvenCode) {
  CpuStream s;
  Buffer w({1, 32});
  w.zero();
  const float ties[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f}, nearest[] = {0, 1, 1, 2, 2, 4, 4};
  w[31] = 6.f;  // scale 1
  for (int i = 0; i < 7; ++i) {
    w[i] = ties[i];
    w[i + 7] = -ties[i];
    w[i + 14] = std::nextafter(ties[i], 10.f);  // just past the tie: the upper neighbour
  }
  const Packed p(s, w);
  const float above[] = {.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  EXPECT_EQ(bytes(p.scale)[0], 127);
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(p.values[i], nearest[i]);
    EXPECT_EQ(p.values[i + 7], -nearest[i]);
    EXPECT_EQ(p.values[i + 14], above[i]);
  }
}

TEST(Mxfp4, Ramp) {
  CpuStream s;
  Buffer w({1, 32});
  for (int i = 0; i < 32; ++i) w[i] = static_cast<float>(i - 16) * 0.3f;
  const Packed p(s, w);
  const float expected[] = {-4, -4, -4, -4, -4, -3,  -3, -3, -2, -2, -2, -1.5, -1, -1, -.5, -.5,
                            0,  .5, .5, 1,  1,  1.5, 2,  2,  2,  3,  3,  3,    4,  4,  4,   4};
  EXPECT_EQ(bytes(p.scale)[0], 127);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(p.values[i], expected[i]) << i;
  const Packed again(s, p.values);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(again.values[i], p.values[i]) << i;
}

TEST(Mxfp4, ScaleIsFloorOfLog2) {
  CpuStream s;
  const float largest[] = {6.f,   std::nextafter(6.f, 7.f), 7.f, 7.9999995f, 8.f, 12.f, 3.999999f, 3.4e38f, 1.2e-38f,
                           1e-40f};
  const int exponent[] = {0, 0, 0, 0, 1, 1, -1, 125, -127, -127};
  for (int i = 0; i < 10; ++i) {
    Buffer w({1, 32});
    w.zero();
    w[13] = -largest[i];
    const Packed p(s, w);
    EXPECT_EQ(bytes(p.scale)[0], exponent[i] + 127) << largest[i];
    EXPECT_EQ(bytes(p.codes)[6] & 15, 0);  // 13 is the high nibble of byte 6
    EXPECT_TRUE(std::isfinite(p.values[13]));
    EXPECT_LE(std::fabs(p.values[13]), 6 * std::exp2(static_cast<double>(exponent[i])));
  }
}

TEST(Mxfp4, ZeroGroupsAndNonFiniteGroups) {
  CpuStream s;
  Buffer w({1, 128});
  w.zero();
  w[5] = -0.f;
  w[32 + 3] = std::nanf("");
  w[64 + 4] = -HUGE_VALF;
  w[96] = 1.f;
  const Packed p(s, w);
  EXPECT_EQ(bytes(p.scale)[0], 127);
  EXPECT_EQ(bytes(p.scale)[1], 255);  // a broken weight stays visible, with its whole group
  EXPECT_EQ(bytes(p.scale)[2], 255);
  EXPECT_EQ(bytes(p.scale)[3], 125);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(p.values[i], 0.f);
    EXPECT_TRUE(std::isnan(p.values[32 + i]) && std::isnan(p.values[64 + i]));
  }
  EXPECT_EQ(p.values[96], 1.f);
}

TEST(Mxfp4, ErrorIsWithinHalfAStepAndRequantisingKeepsValues) {
  CpuStream s;
  Buffer w({37, 160});
  w.normal(1, 0.02f);
  const Packed p(s, w), again(s, p.values);
  double error = 0, size = 0;
  for (int64_t g = 0; g < 37 * 5; ++g) {
    float most = 0;
    for (int64_t i = 32 * g; i < 32 * g + 32; ++i) most = std::max(most, std::fabs(w[i]));
    const float step = std::exp2(std::floor(std::log2(most)) - 2);
    for (int64_t i = 32 * g; i < 32 * g + 32; ++i) {
      ASSERT_LE(std::fabs(p.values[i] - w[i]), 2 * step);  // at most from 8 down to 6
      ASSERT_EQ(again.values[i], p.values[i]);
      error += std::pow(double(p.values[i]) - w[i], 2);
      size += std::pow(double(w[i]), 2);
    }
  }
  EXPECT_NEAR(std::sqrt(error / size), 0.114, 0.006);  // what the floor rule costs on Gaussian weights; 5920 samples
}

TEST(Mxfp4, InPlaceAndOnColumnBlocksWithAnyThreads) {
  CpuStream s;
  Buffer wide({70, 100}), out({70, 64});
  wide.normal(1);
  const Tensor w = (*wide).columns(20, 64);
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  mxfp4_fake_quantize(s, out, w);
  omp_set_num_threads(2);
  mxfp4_fake_quantize(s, w, w);
  omp_set_num_threads(before);
  for (int64_t r = 0; r < 70; ++r)
    for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(w.f32()[r * w.ld + c], out[r * 64 + c]);
}

TEST(Mxfp4, RefusesRowsThatAreNotWholeGroups) {
  CpuStream s;
  Buffer w({2, 48}), out({2, 48}), codes({2, 24}, DType::u8), scale({2, 1}, DType::u8);
  EXPECT_THROW(mxfp4_fake_quantize(s, out, w), ContractError);
  EXPECT_THROW(mxfp4_pack(s, codes, scale, w), ContractError);
}
