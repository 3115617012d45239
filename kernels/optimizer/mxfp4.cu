// MXFP4, the bits of mxfp4_cpu.cpp.  pack reads 4 bytes an element and writes 17/32, unpack the reverse, fake_quantize
// moves 8: bound by memory.  A group of 32 lies in 8 lanes, 4 elements each.
#include "kernels/core/pointwise.cuh"
#include "kernels/optimizer/optimizer_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kGroup = 32;
constexpr int kPacket = 4;
constexpr int kUnroll = 2;
constexpr unsigned kNoNumber = 255;  // E8M0's NaN
constexpr unsigned kNaN = 0x7fc00000u;

// floor(log2 amax) - 2 + 127, at least 0, from the bits of amax.
__device__ __forceinline__ unsigned scale_byte(unsigned amax) {
  if (amax == 0) return 127;
  const unsigned exponent = amax >> 23;  // biased; 0 for subnormals
  if (exponent == 255) return kNoNumber;
  return exponent > 2 ? exponent - 2 : 0;
}

// 2^(byte - 127); 2^-127 is a subnormal float.
__device__ __forceinline__ float scale_value(unsigned byte) {
  return __uint_as_float(byte == kNoNumber ? kNaN : byte == 0 ? 0x00400000u : byte << 23);
}

// One more for every midpoint passed, ties to the even code.
__device__ __forceinline__ unsigned code_of(float magnitude) {
  return (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) + (magnitude > 2.5f) +
         (magnitude >= 3.5f) + (magnitude > 5.f);
}

// E2M1 times the group's scale.  A product with NaN would have other bits here than on the CPU.
__device__ __forceinline__ float value_of(unsigned code, unsigned byte) {
  if (byte == kNoNumber) return __uint_as_float(kNaN);
  const unsigned exponent = (code >> 1) & 3u, fraction = code & 1u;
  const unsigned half = fraction ? 0x3f000000u : 0u;
  const unsigned magnitude = exponent == 0 ? half : ((exponent + 126u) << 23) | (fraction << 22);
  return __uint_as_float(magnitude | ((code & 8u) << 28)) * scale_value(byte);
}

template <bool wide>
__device__ __forceinline__ void load4(float (&x)[kPacket], const float* p) {
  if constexpr (wide) {
    load<kPacket, Cache::once>(x, p);
  } else {
#pragma unroll
    for (int i = 0; i < kPacket; ++i) x[i] = p[i];
  }
}
template <bool wide>
__device__ __forceinline__ void store4(float* p, const float (&x)[kPacket]) {
  if constexpr (wide) {
    store(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < kPacket; ++i) p[i] = x[i];
  }
}

// Null outputs are not written.
template <bool wide>
struct Quantize {
  const float* w;
  uint8_t *packed, *scale;
  float* dequantized;
  int64_t w_ld, packed_ld, scale_ld, dequantized_ld;

  struct Loaded {
    float w[kPacket];
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    Loaded l;
    load4<wide>(l.w, w + r * w_ld + c);
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& l) const {
    unsigned largest = 0;  // of |w| as bits: ordered like the numbers, and a NaN is above all of them
#pragma unroll
    for (int i = 0; i < kPacket; ++i) largest = max(largest, __float_as_uint(l.w[i]) & 0x7fffffffu);
    // Rows are multiples of 32, so the 8 lanes of a group come here together, or none does.
    const unsigned lanes = 0xffu << (threadIdx.x % kWarp / 8 * 8);
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) largest = max(largest, __shfl_xor_sync(lanes, largest, mask));
    const unsigned byte = scale_byte(largest);
    // 2^(127 - byte) is exact and finite for every byte of a finite group (0..252).
    const float inverse = __uint_as_float(byte == kNoNumber ? kNaN : (254u - byte) << 23);
    unsigned code[kPacket];
#pragma unroll
    for (int i = 0; i < kPacket; ++i) {
      code[i] = code_of(fabsf(l.w[i]) * inverse) | (__float_as_uint(l.w[i]) >> 31 << 3);
    }
    if (scale && c % kGroup == 0) scale[r * scale_ld + c / kGroup] = static_cast<uint8_t>(byte);
    if (packed) put_codes(packed + r * packed_ld + c / 2, code);
    if (dequantized) {
      float x[kPacket];
#pragma unroll
      for (int i = 0; i < kPacket; ++i) x[i] = value_of(code[i], byte);
      store4<wide>(dequantized + r * dequantized_ld + c, x);
    }
  }
  __device__ void put_codes(uint8_t* to, const unsigned (&code)[kPacket]) const {
    const unsigned low = code[0] | (code[1] << 4), high = code[2] | (code[3] << 4);
    if constexpr (wide) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(low | (high << 8));
    } else {
      to[0] = static_cast<uint8_t>(low);
      to[1] = static_cast<uint8_t>(high);
    }
  }
};

template <bool wide>
struct Unpack {
  float* dequantized;
  const uint8_t *packed, *scale;
  int64_t dequantized_ld, packed_ld, scale_ld;

  struct Loaded {
    unsigned codes, byte;
  };
  __device__ Loaded load(int64_t r, int64_t c) const {
    const uint8_t* from = packed + r * packed_ld + c / 2;
    Loaded l;
    if constexpr (wide) {
      l.codes = *reinterpret_cast<const uint16_t*>(from);
    } else {
      l.codes = from[0] | (static_cast<unsigned>(from[1]) << 8);
    }
    l.byte = scale[r * scale_ld + c / kGroup];
    return l;
  }
  __device__ void finish(int64_t r, int64_t c, const Loaded& l) const {
    float x[kPacket];
#pragma unroll
    for (int i = 0; i < kPacket; ++i) x[i] = value_of((l.codes >> (4 * i)) & 15u, l.byte);
    store4<wide>(dequantized + r * dequantized_ld + c, x);
  }
};

// Two bytes of codes belong to four floats.
bool codes_wide(const Tensor& packed, const Extent& e) {
  return reinterpret_cast<uintptr_t>(packed.data) % 2 == 0 && (e.rows <= 1 || packed.ld % 2 == 0);
}

template <template <bool> class F, class... Arguments>
void launch(cudaStream_t stream, const Extent& e, bool wide, Arguments... arguments) {
  if (wide) {
    pointwise<kPacket, kUnroll>(stream, e, F<true>{arguments...});
  } else {
    pointwise<kPacket, kUnroll>(stream, e, F<false>{arguments...});
  }
}

}  // namespace

void mxfp4_pack(Stream& s, Tensor packed, Tensor scale, Tensor w) {
  const Extent e = extent_of(w, packed, scale);
  launch<Quantize>(cuda_stream(s), e, wide_extent(kPacket, e, w) && codes_wide(packed, e),
                   static_cast<const float*>(w.f32()), packed.as<uint8_t>(), scale.as<uint8_t>(),
                   static_cast<float*>(nullptr), w.ld, packed.ld, scale.ld, int64_t{0});
}

void mxfp4_unpack(Stream& s, Tensor dequantized, Tensor packed, Tensor scale) {
  const Extent e = extent_of(dequantized, packed, scale);
  launch<Unpack>(cuda_stream(s), e, wide_extent(kPacket, e, dequantized) && codes_wide(packed, e), dequantized.f32(),
                 static_cast<const uint8_t*>(packed.as<uint8_t>()), static_cast<const uint8_t*>(scale.as<uint8_t>()),
                 dequantized.ld, packed.ld, scale.ld);
}

void mxfp4_fake_quantize(Stream& s, Tensor dequantized, Tensor w) {
  const Extent e = extent_of(w, dequantized);
  launch<Quantize>(cuda_stream(s), e, wide_extent(kPacket, e, w, dequantized), static_cast<const float*>(w.f32()),
                   static_cast<uint8_t*>(nullptr), static_cast<uint8_t*>(nullptr), dequantized.f32(), w.ld, int64_t{0},
                   int64_t{0}, dequantized.ld);
}

}  // namespace kestrel::cuda
