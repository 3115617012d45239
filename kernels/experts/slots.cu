// One number per row and per slot, a thread per slot.
//   gather_slots   out[row_of[n,j]] = value[n,j];      scatter_slots   value[n,j] = in[row_of[n,j]], 0 when unused
#include "kernels/core/cuda.cuh"
#include "kernels/experts/experts_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int kThreads = 256;

template <bool gather>
__global__ void slots_kernel(float* rows, float* value, int64_t value_ld, const int32_t* row_of, int64_t row_ld,
                             int64_t pairs, int64_t slots) {
  const int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pair >= pairs) return;
  const int64_t n = pair / slots, j = pair % slots;
  const int32_t row = row_of[n * row_ld + j];
  if constexpr (gather) {
    if (row >= 0) rows[row] = value[n * value_ld + j];
  } else {
    value[n * value_ld + j] = row >= 0 ? rows[row] : 0.f;
  }
}

template <bool gather>
void launch(Stream& s, Tensor rows, Tensor value, const DispatchPlan& plan) {
  const int64_t pairs = plan.max_rows();
  if (pairs == 0) return;
  slots_kernel<gather><<<static_cast<unsigned>(divide_up(pairs, kThreads)), kThreads, 0, cuda_stream(s)>>>(
      rows.f32(), value.f32(), value.ld, plan.row_of.i32(), plan.row_of.ld, pairs, plan.slots());
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
