#include "kernels/experts/experts_cpu.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/parallel.h"
#include "kernels/gemm/gemm.h"

namespace kestrel::cpu {
namespace {

constexpr int64_t kRowGrain = 32;

float* row_f(const Tensor& t, int64_t r) {
  return t.f32() + r * t.ld;
}

int64_t used_rows(const Tensor& offsets) {
  return offsets.as<int64_t>()[offsets.numel() - 1];
}

// The buffer of rows must hold every row in use; how many there are is known on the host only now.
void check_room(int64_t room, const Tensor& offsets) {
  KESTREL_CHECK(used_rows(offsets) <= room, "the plan uses ", used_rows(offsets), " rows, the buffer has ", room);
}

}  // namespace

void dispatch_plan(const DispatchPlan& plan, Tensor index, Tensor cursor) {
  const int64_t N = plan.tokens(), slots = plan.slots(), E = plan.experts();
  int64_t* offset = plan.offsets.as<int64_t>();
  std::fill(offset, offset + E + 1, int64_t{0});
  for (int64_t n = 0; n < N; ++n) {
    const int32_t* id = index.i32() + n * index.ld;
    for (int64_t j = 0; j < slots; ++j) {
      KESTREL_CHECK(id[j] >= -1 && id[j] < E, "token ", n, " names expert ", id[j], " of ", E);
      if (id[j] >= 0) ++offset[id[j] + 1];
    }
  }
  for (int64_t e = 0; e < E; ++e) offset[e + 1] += offset[e];
  int64_t* next = cursor.as<int64_t>();
  std::copy(offset, offset + E, next);
  int32_t* token_of = plan.token_of.i32();
  for (int64_t n = 0; n < N; ++n) {
    const int32_t* id = index.i32() + n * index.ld;
    int32_t* row_of = plan.row_of.i32() + n * plan.row_of.ld;
    for (int64_t j = 0; j < slots; ++j) {
      if (id[j] < 0) {
        row_of[j] = -1;
        continue;
      }
      const int64_t row = next[id[j]]++;
      row_of[j] = static_cast<int32_t>(row);
      token_of[row] = static_cast<int32_t>(n);
    }
  }
}

void gather_rows(Tensor rows, Tensor x, const DispatchPlan& plan) {
  check_room(rows.rows(), plan.offsets);
  const size_t bytes = static_cast<size_t>(x.cols()) * sizeof(float);
  const int32_t* token_of = plan.token_of.i32();
  parallel_pieces(used_rows(plan.offsets), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) std::memcpy(row_f(rows, r), row_f(x, token_of[r]), bytes);
  });
}

void sum_rows(Tensor y, Tensor rows, const DispatchPlan& plan) {
  check_room(rows.rows(), plan.offsets);
  const int64_t width = y.cols(), slots = plan.slots();
  parallel_pieces(plan.tokens(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* row_of = plan.row_of.i32() + n * plan.row_of.ld;
      float* out = row_f(y, n);
      std::fill(out, out + width, 0.f);
      for (int64_t j = 0; j < slots; ++j) {
        if (row_of[j] < 0) continue;
        const float* in = row_f(rows, row_of[j]);
        for (int64_t c = 0; c < width; ++c) out[c] += in[c];
      }
    }
  });
}

void gather_slots(Tensor out, Tensor value, const DispatchPlan& plan) {
  check_room(out.numel(), plan.offsets);
  for (int64_t n = 0; n < plan.tokens(); ++n) {
    const int32_t* row_of = plan.row_of.i32() + n * plan.row_of.ld;
    const float* v = row_f(value, n);
    for (int64_t j = 0; j < plan.slots(); ++j) {
      if (row_of[j] >= 0) out.f32()[row_of[j]] = v[j];
    }
  }
}

void scatter_slots(Tensor value, Tensor in, const DispatchPlan& plan) {
  check_room(in.numel(), plan.offsets);
  for (int64_t n = 0; n < plan.tokens(); ++n) {
    const int32_t* row_of = plan.row_of.i32() + n * plan.row_of.ld;
    float* v = row_f(value, n);
    for (int64_t j = 0; j < plan.slots(); ++j) v[j] = row_of[j] >= 0 ? in.f32()[row_of[j]] : 0.f;
  }
}

namespace {

// fn(e, first row, rows) over tiles of at most kGroupTile rows, none of which crosses into another expert.  The tiles
// depend on the offsets only.
template <class F>
void for_row_tiles(const Tensor& offsets, const Tensor& first_tile, F&& fn) {
  const int64_t E = offsets.numel() - 1;
  const int64_t* offset = offsets.as<int64_t>();
  int64_t* first = first_tile.as<int64_t>();
  first[0] = 0;
  for (int64_t e = 0; e < E; ++e) first[e + 1] = first[e] + (offset[e + 1] - offset[e] + kGroupTile - 1) / kGroupTile;
  parallel_for_dynamic(first[E], [&](int64_t tile) {
    // the last expert whose first tile is at or before this one; empty experts share their first tile with the next
    const int64_t e = std::upper_bound(first, first + E + 1, tile) - first - 1;
    const int64_t begin = offset[e] + (tile - first[e]) * kGroupTile;
    fn(e, begin, std::min(kGroupTile, offset[e + 1] - begin));
  });
}

}  // namespace

void grouped_linear_forward(Tensor y, Tensor x, Tensor w, Tensor offsets, Tensor first_tile) {
  check_room(x.rows(), offsets);
  const int64_t out = w.dim(1), in = w.dim(2);
  for_row_tiles(offsets, first_tile, [&](int64_t e, int64_t row, int64_t n) {
    sgemm_serial(Trans::no, Trans::yes, n, out, in, 1.f, row_f(x, row), x.ld, w.f32() + e * out * in, in, 0.f,
                 row_f(y, row), y.ld);
  });
}

void grouped_linear_backward_input(Tensor dx, Tensor dy, Tensor w, Tensor offsets, Tensor first_tile) {
  check_room(dy.rows(), offsets);
  const int64_t out = w.dim(1), in = w.dim(2);
  for_row_tiles(offsets, first_tile, [&](int64_t e, int64_t row, int64_t n) {
    sgemm_serial(Trans::no, Trans::no, n, in, out, 1.f, row_f(dy, row), dy.ld, w.f32() + e * out * in, in, 0.f,
                 row_f(dx, row), dx.ld);
  });
}

void grouped_linear_backward_weight(Tensor dw, Tensor dy, Tensor x, Tensor offsets) {
  check_room(x.rows(), offsets);
  const int64_t E = dw.dim(0), out = dw.dim(1), in = dw.dim(2);
  const int64_t tiles = (out + kGroupTile - 1) / kGroupTile;
  const int64_t* offset = offsets.as<int64_t>();
  parallel_for_dynamic(E * tiles, [&](int64_t task) {
    const int64_t e = task / tiles, first = task % tiles * kGroupTile;
    const int64_t n = offset[e + 1] - offset[e];
    if (n == 0) return;
    // dw[e][first.., :] += dy_e[:, first..]^T x_e
    sgemm_serial(Trans::yes, Trans::no, std::min(kGroupTile, out - first), in, n, 1.f, row_f(dy, offset[e]) + first,
                 dy.ld, row_f(x, offset[e]), x.ld, 1.f, dw.f32() + (e * out + first) * in, in);
  });
}

}  // namespace kestrel::cpu
