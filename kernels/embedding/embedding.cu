// Forward: a gather of N rows, 2 N D elements moved.  Backward: dy read once, the touched rows of dtable read and
// written once per piece of tokens.  Both are bound by memory.
//
// Backward without atomics, in token order: tokens are cut into pieces of 4096.  One kernel sorts every piece by (id,
// position) in shared memory.  Then, piece after piece, one block per distinct id adds the rows of its tokens to the
// row of the table, in order: the additions are those of a loop over all tokens, so are the bits.
#include <cmath>

#include "kernels/core/pointwise.cuh"
#include "kernels/embedding/embedding_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kPieceBits = 12, kPiece = 1 << kPieceBits;  // tokens
constexpr int kSortThreads = 1024, kAddThreads = 128;
constexpr int kRowsInFlight = 8;

template <class T, int V>
struct Gather {
  T* y;
  const T* table;
  int64_t y_ld, table_ld, vocabulary;
  const int32_t* ids;
  using Loaded = Packed<T, V>;
  __device__ Loaded load(int64_t n, int64_t c) const {
    Loaded row;
    const int64_t id = ids[n];
    if (id >= 0 && id < vocabulary) {
      row.load(table + id * table_ld + c);
    } else {
      float nan[V];
#pragma unroll
      for (int i = 0; i < V; ++i) nan[i] = NAN;
      row.pack(nan);
    }
    return row;
  }
  __device__ void finish(int64_t n, int64_t c, const Loaded& row) const {
    row.store(y + n * y_ld + c);
  }
};

// keys[piece, :] = the piece's (id << 12 | position in the piece), ascending; all ones past the last token.
__global__ void __launch_bounds__(kSortThreads) sort_piece(uint64_t* keys, const int32_t* ids, int64_t N) {
  __shared__ uint64_t key[kPiece];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPiece;
  for (int i = static_cast<int>(threadIdx.x); i < kPiece; i += kSortThreads) {
    const bool valid = first + i < N;
    const uint64_t id = valid ? static_cast<uint32_t>(ids[first + i]) : 0;
    key[i] = valid ? id << kPieceBits | static_cast<uint64_t>(i) : ~uint64_t{0};
  }
  __syncthreads();
  // Bitonic sort: runs of `run` keys, alternately up and down, are merged by compare-exchanges at distance `d`.
  for (int run = 2; run <= kPiece; run *= 2) {
    for (int d = run / 2; d > 0; d /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < kPiece / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (d - 1)), high = low + d;
        const bool up = (low & run) == 0;
        const uint64_t a = key[low], b = key[high];
        if ((a > b) == up) {
          key[low] = b;
          key[high] = a;
        }
      }
      __syncthreads();
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < kPiece; i += kSortThreads) keys[first + i] = key[i];
}

// Block (i, column block) works if key i is the first of its id.
template <class T, int V>
__global__ void __launch_bounds__(kAddThreads) add_piece(float* dtable, int64_t dtable_ld, const T* dy, int64_t dy_ld,
                                                         const uint64_t* keys, int64_t vocabulary, int64_t cols) {
  const int i = static_cast<int>(blockIdx.x);
  const uint64_t id = keys[i] >> kPieceBits;
  if (id >= static_cast<uint64_t>(vocabulary) || (i > 0 && keys[i - 1] >> kPieceBits == id)) return;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * kAddThreads + threadIdx.x) * V;
  if (c >= cols) return;
  float* to = dtable + static_cast<int64_t>(id) * dtable_ld + c;
  float sum[V];
  load(sum, to);
  bool more = true;
  for (int j = i; more; j += kRowsInFlight) {
    Packed<T, V> row[kRowsInFlight];
    bool mine[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const uint64_t key = j + k < kPiece ? keys[j + k] : ~uint64_t{0};
      mine[k] = key >> kPieceBits == id;
      if (mine[k]) row[k].template load<Cache::once>(dy + static_cast<int64_t>(key & (kPiece - 1)) * dy_ld + c);
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (!mine[k]) continue;
      float x[V];
      row[k].unpack(x);
#pragma unroll
      for (int l = 0; l < V; ++l) sum[l] += x[l];
    }
    more = mine[kRowsInFlight - 1];
  }
  store(to, sum);
}

template <class T, int V>
void add_pieces(cudaStream_t stream, const Tensor& dtable, const Tensor& dy, const uint64_t* keys, int64_t pieces) {
  const dim3 grid(kPiece, static_cast<unsigned>(divide_up(dy.cols(), int64_t{kAddThreads} * V)));
  for (int64_t p = 0; p < pieces; ++p) {
    add_piece<T, V><<<grid, kAddThreads, 0, stream>>>(dtable.f32(), dtable.ld, data_of<T>(dy) + p * kPiece * dy.ld,
                                                      dy.ld, keys + p * kPiece, dtable.rows(), dy.cols());
    CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace

void embedding_forward(Stream& s, Tensor y, Tensor ids, Tensor table) {
  const Extent e{y.rows(), y.cols()};
  with_activation(table.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = kPerAccess<T>;
    T *to = data_of<T>(y), *from = data_of<T>(table);
    if (all_wide(V, y, table)) {
      pointwise<V, 2>(cuda_stream(s), e, Gather<T, V>{to, from, y.ld, table.ld, table.rows(), ids.i32()});
    } else {
      pointwise<1, 2>(cuda_stream(s), e, Gather<T, 1>{to, from, y.ld, table.ld, table.rows(), ids.i32()});
    }
  });
}

void embedding_backward(Stream& s, Tensor dtable, Tensor dy, Tensor ids) {
  constexpr int V = 4;
  const int64_t N = dy.rows(), pieces = divide_up(N, kPiece);
  ScratchScope scope(s);
  const Tensor keys = s.temp({pieces, kPiece}, DType::u64);
  if (s.planning() || N == 0 || dy.cols() == 0) return;
  const cudaStream_t stream = cuda_stream(s);
  uint64_t* sorted = static_cast<uint64_t*>(keys.data);
  sort_piece<<<static_cast<unsigned>(pieces), kSortThreads, 0, stream>>>(sorted, ids.i32(), N);
  CUDA_CHECK(cudaGetLastError());
  with_activation(dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (all_wide(V, dtable, dy)) return add_pieces<T, V>(stream, dtable, dy, sorted, pieces);
    add_pieces<T, 1>(stream, dtable, dy, sorted, pieces);
  });
}

}  // namespace kestrel::cuda
