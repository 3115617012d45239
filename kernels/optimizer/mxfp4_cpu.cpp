// MXFP4: E2M1 elements, one E8M0 scale per 32.  README, "MXFP4".
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/optimizer/optimizer_cpu.h"

namespace kestrel::cpu {
namespace {

constexpr int kGroup = 32;
constexpr int kNoNumber = 255;  // E8M0's NaN

// floor(log2 amax) - 2 + 127, at least 0, read from the exponent bits: log2f rounds up just below powers of two.
uint8_t scale_byte(float amax) {
  if (amax == 0.f) return 127;
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(amax) >> 23);  // biased; 0 for subnormals
  if (exponent == 255) return kNoNumber;
  return static_cast<uint8_t>(exponent > 2 ? exponent - 2 : 0);
}

// 2^(byte - 127); 2^-127 is a subnormal float.
float scale_value(uint8_t byte) {
  if (byte == kNoNumber) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);
}

// The code of the nearest of 0 .5 1 1.5 2 3 4 6: one more for every midpoint passed, ties to the even code.
int code_of(float magnitude) {
  return (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) + (magnitude > 2.5f) +
         (magnitude >= 3.5f) + (magnitude > 5.f);
}

constexpr float kValue[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                              -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

void group(const float* w, uint8_t* packed, uint8_t* scale, float* dequantized) {
  uint32_t largest = 0;  // of |w| as bits: ordered like the numbers, and a NaN is above all of them
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(w[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  const uint8_t byte = scale_byte(std::bit_cast<float>(largest));
  const float s = scale_value(byte);
  // 2^(127 - byte) is exact and finite for every byte of a finite group (0..252).
  const float inverse = byte == kNoNumber ? s : std::bit_cast<float>(static_cast<uint32_t>(254 - byte) << 23);
  int32_t code[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const int sign = static_cast<int>(std::bit_cast<uint32_t>(w[i]) >> 31);
    code[i] = code_of(std::fabs(w[i]) * inverse) + 8 * sign;
  }
  if (scale) *scale = byte;
  if (packed) {
    for (int i = 0; i < kGroup / 2; ++i) packed[i] = static_cast<uint8_t>(code[2 * i] | (code[2 * i + 1] << 4));
  }
  if (dequantized) {
    for (int i = 0; i < kGroup; ++i) dequantized[i] = kValue[code[i]] * s;
  }
}

}  // namespace

void mxfp4_quantize_row(int64_t n, const float* w, uint8_t* packed, uint8_t* scale, float* dequantized) {
  for (int64_t i = 0; i < n; i += kGroup) {
    group(w + i, packed ? packed + i / 2 : nullptr, scale ? scale + i / kGroup : nullptr,
          dequantized ? dequantized + i : nullptr);
  }
}

void mxfp4_unpack_row(int64_t n, const uint8_t* packed, const uint8_t* scale, float* dequantized) {
  for (int64_t i = 0; i < n; i += 2) {
    const float s = scale_value(scale[i / kGroup]);
    dequantized[i] = kValue[packed[i / 2] & 15] * s;
    dequantized[i + 1] = kValue[packed[i / 2] >> 4] * s;
  }
}

}  // namespace kestrel::cpu
