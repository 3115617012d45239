// Which of the three products serves: F32 has one, BF16 takes Hopper's where it can.
#include "kernels/core/cuda.h"
#include "kernels/experts/grouped_cuda.h"

namespace kestrel::cuda {
namespace {

void run(Stream& s, const GroupedProblem& p, GroupedPath path) {
  // Nothing to write, or (backward_weight) nothing to add.
  if (p.experts == 0 || p.M == 0 || p.N == 0 || p.room() == 0) return;
  const bool hopper = path != GroupedPath::portable && grouped_hopper_serves(p);
  KESTREL_CHECK(hopper || path == GroupedPath::automatic || path == GroupedPath::portable,
                "Hopper's product of groups cannot serve ", name_of(p.dtype), " M ", p.M, " N ", p.N, " K ", p.K,
                ", ld ", p.lda, " ", p.ldb, " ", p.ldd, " on this device");
  if (hopper) return grouped_hopper(s, p, path);
  p.dtype == DType::f32 ? grouped_f32(s, p) : grouped_mma(s, p);
}

}  // namespace

void grouped_linear_forward(Stream& s, Tensor y, Tensor x, Tensor w, Tensor offsets, GroupedPath path) {
  GroupedProblem p;
  p.what = Grouped::forward, p.dtype = x.dtype;
  p.a = x.data, p.b = w.data, p.d = y.data;
  p.lda = x.ld, p.ldb = w.dim(2), p.ldd = y.ld;
  p.offsets = offsets.as<int64_t>(), p.experts = w.dim(0);
  p.M = x.rows(), p.N = w.dim(1), p.K = w.dim(2);
  run(s, p, path);
}

void grouped_linear_backward_input(Stream& s, Tensor dx, Tensor dy, Tensor w, Tensor offsets, GroupedPath path) {
  GroupedProblem p;
  p.what = Grouped::backward_input, p.dtype = dy.dtype;
  p.a = dy.data, p.b = w.data, p.d = dx.data;
  p.lda = dy.ld, p.ldb = w.dim(2), p.ldd = dx.ld;
  p.offsets = offsets.as<int64_t>(), p.experts = w.dim(0);
  p.M = dy.rows(), p.N = w.dim(2), p.K = w.dim(1);
  run(s, p, path);
}

void grouped_linear_backward_weight(Stream& s, Tensor dw, Tensor dy, Tensor x, Tensor offsets, GroupedPath path) {
  GroupedProblem p;
  p.what = Grouped::backward_weight, p.dtype = x.dtype;
  p.a = dy.data, p.b = x.data, p.d = dw.data;
  p.lda = dy.ld, p.ldb = x.ld, p.ldd = dw.dim(2);
  p.offsets = offsets.as<int64_t>(), p.experts = dw.dim(0);
  p.M = dw.dim(1), p.N = dw.dim(2), p.K = x.rows();
  run(s, p, path);
}

}  // namespace kestrel::cuda
