// Element types of tensors and files, and bf16 on the host.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace kestrel {

enum class DType : uint8_t { f32, bf16, f16, f64, u8, i8, u16, i16, i32, u32, i64, u64, boolean };

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::u8:
    case DType::i8:
    case DType::boolean:
      return 1;
    case DType::bf16:
    case DType::f16:
    case DType::u16:
    case DType::i16:
      return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
  }
  return 0;
}

// The safetensors spelling: "F32", "BF16", ...
constexpr std::string_view name_of(DType t) {
  switch (t) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f64:
      return "F64";
    case DType::u8:
      return "U8";
    case DType::i8:
      return "I8";
    case DType::u16:
      return "U16";
    case DType::i16:
      return "I16";
    case DType::i32:
      return "I32";
    case DType::u32:
      return "U32";
    case DType::i64:
      return "I64";
    case DType::u64:
      return "U64";
    case DType::boolean:
      return "BOOL";
  }
  return "?";
}

// bfloat16 storage: the upper half of a float.  Rounds to nearest even; a NaN stays a quiet NaN.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float f) {
    uint32_t u = std::bit_cast<uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
struct dtype_of_t;
template <>
struct dtype_of_t<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of_t<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of_t<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of_t<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of_t<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of_t<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct dtype_of_t<uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct dtype_of_t<uint32_t> {
  static constexpr DType value = DType::u32;
};
template <class T>
constexpr DType dtype_of = dtype_of_t<T>::value;

}  // namespace kestrel
