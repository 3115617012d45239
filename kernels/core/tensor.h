// A tensor is a view: pointer, dtype, device, shape.  It owns nothing.
//
// The last dimension is dense.  All dimensions before it are flattened to rows; two rows lie `ld` elements apart
// (ld == cols() for a contiguous tensor).  So a block of columns of a matrix is a tensor too: see `columns`.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "kernels/core/dtype.h"
#include "kernels/core/error.h"

namespace kestrel {

enum class Device : uint8_t { cpu, cuda };
constexpr const char* name_of(Device d) {
  return d == Device::cpu ? "cpu" : "cuda";
}

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::array<int64_t, 4> shape{};
  int64_t ld = 0;  // elements between two rows

  Tensor() = default;
  Tensor(void* p, std::initializer_list<int64_t> dims, DType t = DType::f32, Device d = Device::cpu)
      : data(p), dtype(t), device(d), rank(static_cast<int>(dims.size())) {
    KESTREL_CHECK(rank >= 1 && rank <= 4, "a tensor has 1 to 4 dimensions, got ", rank);
    int i = 0;
    for (int64_t n : dims) shape[static_cast<size_t>(i++)] = n;
    ld = cols();
  }
  template <class T>
  static Tensor of(T* p, std::initializer_list<int64_t> dims, Device d = Device::cpu) {
    return Tensor(const_cast<std::remove_const_t<T>*>(p), dims, dtype_of<std::remove_const_t<T>>, d);
  }

  bool empty() const { return rank == 0; }  // "not given"; a tensor of zero elements is not empty
  explicit operator bool() const { return rank != 0; }
  int64_t dim(int i) const { return shape[static_cast<size_t>(i)]; }
  int64_t cols() const { return rank == 0 ? 0 : shape[static_cast<size_t>(rank - 1)]; }
  int64_t rows() const {
    if (rank == 0) return 0;
    int64_t n = 1;
    for (int i = 0; i + 1 < rank; ++i) n *= shape[static_cast<size_t>(i)];
    return n;
  }
  int64_t numel() const { return rows() * cols(); }
  int64_t bytes() const { return numel() * size_of(dtype); }
  bool contiguous() const { return ld == cols() || rows() <= 1; }

  template <class T>
  T* as() const {
    KESTREL_CHECK(dtype == dtype_of<T>, "tensor ", describe(), " read as ", name_of(dtype_of<T>));
    return static_cast<T*>(data);
  }
  float* f32() const { return as<float>(); }
  int32_t* i32() const { return as<int32_t>(); }

  // The same elements under another shape; the tensor must be contiguous.
  Tensor view(std::initializer_list<int64_t> dims) const {
    Tensor t(data, dims, dtype, device);
    KESTREL_CHECK(contiguous() && t.numel() == numel(), "cannot view ", describe(), " as ", t.describe());
    return t;
  }
  // As a matrix [rows, cols], keeping ld.
  Tensor matrix() const {
    Tensor t = *this;
    t.rank = 2;
    t.shape = {rows(), cols(), 0, 0};
    return t;
  }
  // Columns [first, first + count) of the matrix view.
  Tensor columns(int64_t first, int64_t count) const {
    KESTREL_CHECK(first >= 0 && count >= 0 && first + count <= cols(), "columns ", first, "+", count, " of ",
                  describe());
    Tensor t = matrix();
    t.data = static_cast<char*>(data) + first * size_of(dtype);
    t.shape[1] = count;
    return t;
  }
  // Entries [first, first + count) along the first dimension.
  Tensor slice(int64_t first, int64_t count) const {
    KESTREL_CHECK(rank >= 1 && first >= 0 && count >= 0 && first + count <= shape[0], "slice ", first, "+", count,
                  " of ", describe());
    Tensor t = *this;
    const int64_t step = rank == 1 ? 1 : (rows() / (shape[0] ? shape[0] : 1)) * ld;
    t.data = static_cast<char*>(data) + first * step * size_of(dtype);
    t.shape[0] = count;
    return t;
  }
  // Entry i along the first dimension, that dimension dropped (rank >= 2).
  Tensor operator[](int64_t i) const {
    Tensor t = slice(i, 1);
    KESTREL_CHECK(rank >= 2, "cannot index ", describe());
    for (int j = 0; j + 1 < rank; ++j) t.shape[static_cast<size_t>(j)] = shape[static_cast<size_t>(j + 1)];
    t.shape[static_cast<size_t>(--t.rank)] = 0;
    return t;
  }

  std::string describe() const;  // "F32[2,3] cpu"
};

// "a is [rows, cols], dtype, on the stream's device" in one line; cols < 0 leaves the columns open.
inline void check_matrix(const char* name, const Tensor& t, DType dtype, int64_t rows, int64_t cols) {
  KESTREL_CHECK(t.dtype == dtype && t.rows() == rows && (cols < 0 || t.cols() == cols), name, " is ", t.describe(),
                ", expected ", name_of(dtype), "[", rows, ",", cols, "]");
}

}  // namespace kestrel
