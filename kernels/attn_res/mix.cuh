// What the forward and the backward kernels of attention over depth share.
//
// Two kernels each way.  `Group` kernels: a block of G threads per token, two packets of 8 columns per thread, up to
// 8192 columns and kFewSources sources, 16-byte accesses.  `Loop` kernels: any width, any alignment, up to
// kManySources.
#pragma once

#include <vector>

#include "kernels/core/cuda.cuh"

namespace kestrel::cuda {

constexpr int kPacket = 8;  // columns; the packets of a thread lie G packets apart
constexpr int kBatch = 4;   // sources whose sums are reduced together
constexpr int kFewSources = 64, kManySources = 480;
constexpr int kLoopThreads = 256;

template <class T>
struct Rows {
  T* data = nullptr;
  int64_t ld = 0;
  Rows() = default;
  explicit Rows(const Tensor& t) : data(t ? data_of<T>(t) : nullptr), ld(t.ld) {}
  __device__ __forceinline__ T* operator[](int64_t n) const { return data + n * ld; }
  __host__ __device__ explicit operator bool() const { return data != nullptr; }
};

// Matrices, handed to a kernel by value.
template <class T, int capacity>
struct RowsList {
  Rows<T> rows[capacity];
  RowsList() = default;
  explicit RowsList(const std::vector<Tensor>& tensors) {
    KESTREL_CHECK(tensors.size() <= static_cast<size_t>(capacity), "a mix of ", tensors.size(),
                  " sources; CUDA takes up to ", capacity);
    for (size_t j = 0; j < tensors.size(); ++j) rows[j] = Rows<T>(tensors[j]);
  }
  __device__ __forceinline__ const Rows<T>& operator[](int j) const { return rows[j]; }
};

template <int G, int P>
struct Group {
  static constexpr int kThreads = G, kPackets = P;
};
// f(Group<G, P>{}) for the first of `Groups` that holds D columns; false when none does.
template <class... Groups, class F>
bool with_group(int64_t D, F&& f) {
  return ((D <= Groups::kThreads * Groups::kPackets * kPacket && (f(Groups{}), true)) || ...);
}

inline bool all_wide(int V, const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) {
    if (!wide(t, V)) return false;
  }
  return true;
}

// Sums 2 kBatch = 8 values over a block of G threads at once: a butterfly that halves the number of values with every
// step (7 + 2 shuffles instead of 40), then warps in order.  Every thread gets the same bits.  `sum` synchronises the
// block once: it alternates between two buffers.
template <int G>
class BlockSum8 {
 public:
  static constexpr int kWarps = G / kWarp;
  using Shared = float[2][kWarps][8];
  __device__ explicit BlockSum8(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ void sum(float (&x)[8]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = exchange(x[i], x[i + 4], lane & 16, 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = exchange(a[i], a[i + 2], lane & 8, 8);
    float c = exchange(b[0], b[1], lane & 4, 4);
    c += __shfl_xor_sync(0xffffffffu, c, 2);
    c += __shfl_xor_sync(0xffffffffu, c, 1);
    // Lane 4 i holds value 4 (i >> 2 & 1) + 2 (i >> 1 & 1) + (i & 1) = i.
    float(&buffer)[kWarps][8] = shared_[turn_];
    turn_ ^= 1;
    if (lane % 4 == 0) buffer[warp][lane / 4] = c;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] += buffer[w][i];
    }
  }

 private:
  // The lower half of the lanes keeps `low`, the upper half `high`; each adds what the other half has of it.
  __device__ __forceinline__ static float exchange(float low, float high, int upper, int mask) {
    const float kept = upper ? high : low, sent = upper ? low : high;
    return kept + __shfl_xor_sync(0xffffffffu, sent, mask);
  }
  Shared& shared_;
  int turn_ = 0;
};

}  // namespace kestrel::cuda
