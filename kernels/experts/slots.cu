// One number per row and per slot, a thread per slot.
//   gather_slots   out[row_of[n,j]] = value[n,j];      scatter_slots   value[n,j] = in[row_of[n,j]], 0 when unused
// 12 bytes per slot, 4 of them scattered by expert: bound by latency.
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr unsigned kThreads = 256;

// room: rows that the vector of rows has; a row outside [0, room) counts as unused.
template <bool gather>
__global__ void __launch_bounds__(kThreads)
    slots_kernel(float* rows, uint32_t room, float* value, int64_t value_ld, const int32_t* row_of, int64_t row_ld,
                 unsigned pairs, unsigned slots) {
  const unsigned pair = blockIdx.x * kThreads + threadIdx.x;  // below 2^31 + 256
  if (pair >= pairs) return;
  const unsigned n = pair / slots, j = pair - n * slots;
  const uint32_t row = static_cast<uint32_t>(row_of[n * row_ld + j]);
  if constexpr (gather) {
    if (row < room) rows[row] = value[n * value_ld + j];
  } else {
    value[n * value_ld + j] = row < room ? rows[row] : 0.f;
  }
}

template <bool gather>
void launch(Stream& s, Tensor rows, Tensor value, const DispatchPlan& plan) {
  const int64_t pairs = plan.max_rows(), room = rows.numel() < pairs ? rows.numel() : pairs;
  if (pairs == 0) return;
  slots_kernel<gather><<<static_cast<unsigned>(divide_up(pairs, kThreads)), kThreads, 0, cuda_stream(s)>>>(
      rows.f32(), static_cast<uint32_t>(room), value.f32(), value.ld, plan.row_of.i32(), plan.row_of.ld,
      static_cast<unsigned>(pairs), static_cast<unsigned>(plan.slots()));
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void gather_slots(Stream& s, Tensor out, Tensor value, const DispatchPlan& plan) {
  launch<true>(s, out, value, plan);
}

void scatter_slots(Stream& s, Tensor value, Tensor in, const DispatchPlan& plan) {
  launch<false>(s, in, value, plan);
}

}  // namespace kestrel::cuda
