// Products by cuBLASLt.  Bound by tensor cores for the model's sizes: 2 M N K operations, M K + K N + M N elements.
//
// A row-major C = op(A) op(B) is the column-major C^T = op(B)^T op(A)^T on the same memory, so B is cuBLASLt's first
// operand.  The algorithm of a shape is the first that cuBLASLt's heuristic proposes; the heuristic is a function of
// the shape, the leading dimensions and the alignment of the pointers, so two runs choose alike and no timing enters.
// Splits of K are summed in fp32 in the workspace, in a fixed order.
#include <cublasLt.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/core/cuda.h"
#include "kernels/core/device_cuda.h"
#include "kernels/gemm/gemm_cuda.h"

namespace kestrel::cuda {
namespace {

constexpr int64_t kWorkspace = int64_t{32} << 20;  // what NVIDIA recommends for Hopper
constexpr size_t kMostDevices = 64;

[[noreturn]] void cublas_failure(cublasStatus_t status, const char* statement, const std::string& what) {
  const char* hint = status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED
                         ? "Free the device of other programs (nvidia-smi lists them), or lower "
                           "train.micro_batch_size so that some device memory stays free for cuBLAS."
                         : "Run again with CUBLASLT_LOG_LEVEL=2 to see cuBLAS's own message, and please report it with "
                           "the config.";
  throw DeviceError(text("cuBLAS error ", static_cast<int>(status), " (", cublasLtGetStatusName(status), ": ",
                         cublasLtGetStatusString(status), ") in ", statement, " for ", what, ". ", hint));
}

#define CUBLAS_CHECK(what, ...)                                                                        \
  do {                                                                                                 \
    const cublasStatus_t kestrel_status_ = (__VA_ARGS__);                                              \
    if (kestrel_status_ != CUBLAS_STATUS_SUCCESS) cublas_failure(kestrel_status_, #__VA_ARGS__, what); \
  } while (0)

std::string describe(const GemmProblem& p) {
  return text(name_of(p.out), "[", p.M, ",", p.N, "] = ", name_of(p.in), " A", p.ta == Trans::yes ? "^T" : "", " B",
              p.tb == Trans::yes ? "^T" : "", " over K = ", p.K, ", ld ", p.lda, " ", p.ldb, " ", p.ldc,
              p.batch > 1 ? text(", ", p.batch, " times") : "");
}

// cuBLASLt's objects, owned.
template <class T, cublasStatus_t (*destroy)(T)>
struct Destroy {
  using pointer = T;
  void operator()(T x) const { destroy(x); }
};
using Operation = std::unique_ptr<cublasLtMatmulDesc_t, Destroy<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayout_t, Destroy<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreference_t, Destroy<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

// The largest power of two up to 256 that divides the address of every matrix of a batch.
uint32_t alignment_of(const void* p, int64_t stride, DType t) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride * size_of(t)) | 256u;
  return static_cast<uint32_t>(address & (~address + 1));
}
struct Alignments {
  uint32_t a, b, c;
  explicit Alignments(const GemmProblem& p)
      : a(alignment_of(p.a, p.a_stride, p.in)),
        b(alignment_of(p.b, p.b_stride, p.in)),
        c(alignment_of(p.c, p.c_stride, p.out)) {}
};

// All that the choice of an algorithm may depend on.
using Key = std::tuple<Trans, Trans, DType, DType, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t>;
Key key_of(const GemmProblem& p) {
  const Alignments align(p);
  return {p.ta,  p.tb,  p.in,    p.out,      p.beta != 0.f, p.M,        p.N,     p.K,     p.lda,
          p.ldb, p.ldc, p.batch, p.a_stride, p.b_stride,    p.c_stride, align.a, align.b, align.c};
}

// What cuBLASLt needs to run one key: made once.
struct Plan {
  Operation operation;
  Layout first, second, result;  // op(B)^T, op(A)^T, C^T
  cublasLtMatmulAlgo_t algorithm{};
  bool found = false;  // false: cuBLASLt has none, the plain product serves
};

cudaDataType_t cuda_type(DType t) {
  return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

Layout make_layout(const GemmProblem& p, DType t, int64_t rows, int64_t cols, int64_t ld, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  CUBLAS_CHECK(describe(p), cublasLtMatrixLayoutCreate(&layout, cuda_type(t), static_cast<uint64_t>(rows),
                                                       static_cast<uint64_t>(cols), ld > rows ? ld : rows));
  Layout owned(layout);
  if (p.batch > 1) {
    const int32_t count = static_cast<int32_t>(p.batch);
    CUBLAS_CHECK(describe(p),
                 cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    CUBLAS_CHECK(describe(p), cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                               &stride, sizeof stride));
  }
  return owned;
}

Operation make_operation(const GemmProblem& p) {
  cublasLtMatmulDesc_t operation = nullptr;
  CUBLAS_CHECK(describe(p), cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  Operation owned(operation);
  const cublasOperation_t first = p.tb == Trans::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = p.ta == Trans::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
  CUBLAS_CHECK(describe(p),
               cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
  CUBLAS_CHECK(describe(p),
               cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
  return owned;
}

Preference make_preference(const GemmProblem& p) {
  cublasLtMatmulPreference_t preference = nullptr;
  CUBLAS_CHECK(describe(p), cublasLtMatmulPreferenceCreate(&preference));
  Preference owned(preference);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    CUBLAS_CHECK(describe(p), cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspace));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const Alignments align(p);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align.b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align.a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align.c);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align.c);
  return owned;
}

Plan make_plan(cublasLtHandle_t handle, const GemmProblem& p) {
  Plan plan;
  plan.operation = make_operation(p);
  plan.first = p.tb == Trans::yes ? make_layout(p, p.in, p.K, p.N, p.ldb, p.b_stride)
                                  : make_layout(p, p.in, p.N, p.K, p.ldb, p.b_stride);
  plan.second = p.ta == Trans::yes ? make_layout(p, p.in, p.M, p.K, p.lda, p.a_stride)
                                   : make_layout(p, p.in, p.K, p.M, p.lda, p.a_stride);
  plan.result = make_layout(p, p.out, p.N, p.M, p.ldc, p.c_stride);
  const Preference preference = make_preference(p);
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, plan.operation.get(), plan.first.get(), plan.second.get(),
                                     plan.result.get(), plan.result.get(), preference.get(), 1, &best, &found);
  // Both words mean that no algorithm takes this shape or alignment.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return plan;
  if (status != CUBLAS_STATUS_SUCCESS) cublas_failure(status, "cublasLtMatmulAlgoGetHeuristic", describe(p));
  plan.found = found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = best.algo;
  return plan;
}

// cuBLASLt on one device: its handle, its plans and one workspace, which all products of the device share.  So products
// of one device must be queued in one order: on one stream, or on streams that wait for each other.
class Products {
 public:
  // The one of the current device; made at first use and kept until the process ends, when the driver frees it (its
  // destructor could run after the driver's).
  static Products& of_device() {
    static std::mutex mutex;
    static std::array<Products*, kMostDevices> known{};
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    KESTREL_CHECK(device >= 0 && static_cast<size_t>(device) < known.size(), "device ", device);
    const std::lock_guard lock(mutex);
    Products*& slot = known[static_cast<size_t>(device)];
    if (slot == nullptr) slot = new Products();
    return *slot;
  }

  const Plan& plan(const GemmProblem& p) {
    const std::lock_guard lock(mutex_);
    const auto [at, fresh] = plans_.try_emplace(key_of(p));
    if (fresh) {
      try {
        at->second = make_plan(handle_, p);
      } catch (...) {
        plans_.erase(at);
        throw;
      }
    }
    return at->second;
  }

  void run(cudaStream_t stream, const Plan& plan, const GemmProblem& p) const {
    const cublasStatus_t status =
        cublasLtMatmul(handle_, plan.operation.get(), &p.alpha, p.b, plan.first.get(), p.a, plan.second.get(), &p.beta,
                       p.c, plan.result.get(), p.c, plan.result.get(), &plan.algorithm, workspace_,
                       static_cast<size_t>(kWorkspace), stream);
    if (status != CUBLAS_STATUS_SUCCESS) cublas_failure(status, "cublasLtMatmul", describe(p));
  }

 private:
  Products() : workspace_(allocate(kWorkspace, "cuBLAS's workspace")) {
    const cublasStatus_t status = cublasLtCreate(&handle_);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    release(workspace_);
    cublas_failure(status, "cublasLtCreate", "the device");
  }

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;  // references to its values stay valid
};

}  // namespace

void gemm(Stream& s, const GemmProblem& p) {
  if (p.M == 0 || p.N == 0 || p.batch == 0) return;
  if (p.K == 0 || p.batch > INT32_MAX) return gemm_plain(s, p);
  Products& products = Products::of_device();
  const Plan& plan = products.plan(p);
  if (!plan.found) return gemm_plain(s, p);
  products.run(cuda_stream(s), plan, p);
}

}  // namespace kestrel::cuda
