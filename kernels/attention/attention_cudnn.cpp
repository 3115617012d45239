// cuDNN is loaded when it is first asked for, so that the program starts where it is not installed.  This is the one
// file that includes cuDNN's frontend.
#include "kernels/attention/attention_cudnn.h"

#ifdef KESTREL_HAVE_CUDNN

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "kernels/core/cuda.h"
#include "kernels/core/device_cuda.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the frontend's own hook for a library loaded at run time
}

namespace kestrel::cuda::cudnn {
namespace {

namespace fe = cudnn_frontend;

constexpr int64_t kShortest = 128;       // below it a launch of cuDNN costs more than the work
constexpr size_t kLeastVersion = 91300;  // before: attention backward is wrong at some shapes, or refuses 192/128
constexpr size_t kMostDevices = 64;

// ---------------------------------------------------------------- the library

struct Library {
  void* handle = nullptr;
  size_t version = 0;
  std::string why_not;
  cudnnStatus_t (*set_stream)(cudnnHandle_t, cudaStream_t) = nullptr;

  Library() {
    handle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* error = dlerror();
      why_not = text("cuDNN 9 cannot be loaded: ", error ? error : "unknown reason",
                     ". Install libcudnn9, or add its folder to LD_LIBRARY_PATH.");
      return;
    }
    fe::cudnn_dlhandle = handle;
    set_stream = reinterpret_cast<decltype(set_stream)>(dlsym(handle, "cudnnSetStream"));
    version = fe::detail::get_backend_version();
    if (version >= kLeastVersion && set_stream != nullptr) return;
    why_not = text("cuDNN ", version / 10000, ".", version / 100 % 100, ".", version % 100,
                   " is too old: attention needs 9.13 or newer.");
  }
  bool usable() const { return why_not.empty(); }
};

const Library& library() {
  static const Library loaded;
  return loaded;
}

// ---------------------------------------------------------------- graphs

enum class Kind : uint8_t { forward, forward_with_max, backward };

// Names of the tensors of a graph.
enum Id : int64_t { kQ = 1, kK, kV, kO, kStats, kSum, kGradO, kGradQ, kGradK, kGradV };

// All that a graph depends on: kind, the (sliced) sizes, and the leading dimensions of q k v o d_o dq dk dv.
struct Key {
  Kind kind;
  int64_t B, T, H, Dqk, Dv;
  std::array<int64_t, 8> ld;
  auto operator<=>(const Key&) const = default;
};

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;
  std::string why_not;  // cuDNN's words when it has no plan; empty otherwise
};

using TensorRef = std::shared_ptr<fe::graph::Tensor_attributes>;

// [B,H,T,D] in rows of [B*T, H*D] that lie ld apart.
fe::graph::Tensor_attributes head_tensor(const Key& k, Id id, int64_t D, int64_t ld) {
  return fe::graph::Tensor_attributes()
      .set_uid(id)
      .set_dim({k.B, k.H, k.T, D})
      .set_stride({k.T * ld, D, ld, 1})
      .set_data_type(fe::DataType_t::BFLOAT16);
}
fe::graph::Tensor_attributes row_tensor(const Key& k, Id id) {
  return fe::graph::Tensor_attributes()
      .set_uid(id)
      .set_dim({k.B, k.H, k.T, 1})
      .set_stride({k.H * k.T, k.T, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}
void as_output(const TensorRef& t, const Key& k, Id id, int64_t D, int64_t ld) {
  t->set_output(true)
      .set_uid(id)
      .set_dim({k.B, k.H, k.T, D})
      .set_stride({k.T * ld, D, ld, 1})
      .set_data_type(fe::DataType_t::BFLOAT16);
}

float scale_of(int64_t Dqk) {
  return 1.f / std::sqrt(static_cast<float>(Dqk));
}

void add_forward(fe::graph::Graph& g, const Key& k) {
  const TensorRef q = g.tensor(head_tensor(k, kQ, k.Dqk, k.ld[0])), key = g.tensor(head_tensor(k, kK, k.Dqk, k.ld[1])),
                  v = g.tensor(head_tensor(k, kV, k.Dv, k.ld[2]));
  const bool with_max = k.kind == Kind::forward_with_max;
  auto options = fe::graph::SDPA_attributes()
                     .set_name("attention")
                     .set_generate_stats(!with_max)
                     .set_attn_scale(scale_of(k.Dqk))
                     .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                     .set_diagonal_band_right_bound(0);
  if (with_max) {
    const auto largest = g.tensor(row_tensor(k, kStats)), sum = g.tensor(row_tensor(k, kSum));
    largest->set_output(true);
    sum->set_output(true);
    options.set_logit_max(largest).set_score_sum_exp(sum);
  }
  const auto [o, stats] = g.sdpa(q, key, v, options);
  as_output(o, k, kO, k.Dv, k.ld[3]);
  if (!with_max) {
    stats->set_output(true)
        .set_uid(kStats)
        .set_dim({k.B, k.H, k.T, 1})
        .set_stride({k.H * k.T, k.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }
}

void add_backward(fe::graph::Graph& g, const Key& k) {
  const TensorRef q = g.tensor(head_tensor(k, kQ, k.Dqk, k.ld[0])), key = g.tensor(head_tensor(k, kK, k.Dqk, k.ld[1])),
                  v = g.tensor(head_tensor(k, kV, k.Dv, k.ld[2])), o = g.tensor(head_tensor(k, kO, k.Dv, k.ld[3])),
                  d_o = g.tensor(head_tensor(k, kGradO, k.Dv, k.ld[4])), stats = g.tensor(row_tensor(k, kStats));
  const auto options = fe::graph::SDPA_backward_attributes()
                           .set_name("attention_backward")
                           .set_attn_scale(scale_of(k.Dqk))
                           .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                           .set_diagonal_band_right_bound(0)
                           .set_deterministic_algorithm(true);
  const auto [dq, dk, dv] = g.sdpa_backward(q, key, v, o, d_o, stats, options);
  as_output(dq, k, kGradQ, k.Dqk, k.ld[5]);
  as_output(dk, k, kGradK, k.Dqk, k.ld[6]);
  as_output(dv, k, kGradV, k.Dv, k.ld[7]);
}

Plan make_plan(cudnnHandle_t handle, const Key& k) {
  Plan plan;
  try {
    plan.graph = std::make_shared<fe::graph::Graph>();
    plan.graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    k.kind == Kind::backward ? add_backward(*plan.graph, k) : add_forward(*plan.graph, k);
    auto status = plan.graph->build(handle, {fe::HeurMode_t::A});
    if (status.is_good()) status = plan.graph->get_workspace_size(plan.workspace);
    if (!status.is_good()) plan.why_not = status.get_message().empty() ? "no reason given" : status.get_message();
  } catch (const std::exception& e) {
    plan.why_not = e.what();
  }
  return plan;
}

// ---------------------------------------------------------------- devices

// cuDNN on one device: its handle and its plans.
class Attention {
 public:
  // The one of the current device, or null on a machine without one; kept until the process ends.
  static Attention* of_device() {
    static std::mutex mutex;
    static std::array<Attention*, kMostDevices> known{};
    int device = 0;
    if (cuda::device_count().count == 0) return nullptr;
    CUDA_CHECK(cudaGetDevice(&device));
    KESTREL_CHECK(device >= 0 && static_cast<size_t>(device) < known.size(), "device ", device);
    const std::lock_guard lock(mutex);
    Attention*& slot = known[static_cast<size_t>(device)];
    if (slot == nullptr) slot = new Attention();
    return slot;
  }

  const Plan& plan(const Key& k) {
    const std::lock_guard lock(mutex_);
    const auto at = plans_.find(k);
    return at != plans_.end() ? at->second : plans_.emplace(k, make_plan(handle_, k)).first->second;
  }

  void run(const Stream& s, const Plan& plan, std::unordered_map<int64_t, void*>& tensors, const Tensor& workspace) {
    const std::lock_guard lock(mutex_);  // the handle carries the stream
    const cudnnStatus_t status = library().set_stream(handle_, cuda_stream(s));
    if (status != CUDNN_STATUS_SUCCESS) fail("cudnnSetStream", text("status ", static_cast<int>(status)));
    const auto result = plan.graph->execute(handle_, tensors, workspace.data);
    if (!result.is_good()) fail("attention", result.err_msg);
  }

 private:
  Attention() {
    const cudnnStatus_t status = fe::detail::create_handle(&handle_);
    if (status != CUDNN_STATUS_SUCCESS) fail("cudnnCreate", text("status ", static_cast<int>(status)));
  }
  [[noreturn]] static void fail(const char* what, const std::string& why) {
    throw DeviceError(text("cuDNN error in ", what, ": ", why,
                           ". Run again with CUDNN_LOGERR_DBG=1 and CUDNN_LOGDEST_DBG=stderr to see more, or build "
                           "with -DKESTREL_CUDNN=OFF to use the own kernels."));
  }

  cudnnHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;  // references to its values stay valid
};

// ---------------------------------------------------------------- which problems

// Rows of 16-byte pieces in every head.
bool aligned(const Tensor& t) {
  return t.dtype == DType::bf16 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.ld % 8 == 0;
}

// Pairs of widths that cuDNN 9.13 and later compute rightly on Hopper, forward and backward.
bool known_widths(int64_t Dqk, int64_t Dv) {
  if (Dqk % 8 != 0 || Dv % 8 != 0 || Dqk > 256 || Dv > 256) return false;
  return Dqk == Dv || (Dqk < 128 && Dv < 128) || (Dqk == 192 && Dv == 128);
}

bool fits(const Problem& p) {
  return available() && !p.documents && p.d.B > 0 && p.d.T >= kShortest && p.d.T <= INT32_MAX &&
         known_widths(p.d.Dqk, p.d.Dv) && aligned(p.q) && aligned(p.k) && aligned(p.v) && aligned(p.o);
}

Key forward_key(const AttentionDims& d, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                bool with_max_logit) {
  return {with_max_logit ? Kind::forward_with_max : Kind::forward,
          d.B,
          d.T,
          d.H,
          d.Dqk,
          d.Dv,
          {q.ld, k.ld, v.ld, o.ld, 0, 0, 0, 0}};
}

Key backward_key(const AttentionDims& d, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                 const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const HeadSlice slice = backward_slice(d);
  return {Kind::backward,
          slice.batches,
          d.T,
          slice.heads,
          d.Dqk,
          d.Dv,
          {q.ld, k.ld, v.ld, o.ld, d_o.ld, dq.ld, dk.ld, dv.ld}};
}

bool planned(const Key& key) {
  Attention* attention = Attention::of_device();
  return attention == nullptr || attention->plan(key).why_not.empty();
}

int64_t workspace_per_head(int64_t T) {
  return divide_up(T, 64) * 64 * (divide_up(T, 128) * 128) * 2;
}

// Where there is no device to ask (a plan of memory on another machine): what cuDNN 9.19 asks for on an H200.
int64_t expected_workspace(const Key& k) {
  return k.kind == Kind::backward ? k.B * k.H * (workspace_per_head(k.T) + 8 * k.T) + 4096 : 4096;
}

Tensor take_workspace(Stream& s, const Key& key) {
  Attention* attention = Attention::of_device();
  const int64_t bytes = attention == nullptr ? expected_workspace(key) : attention->plan(key).workspace;
  return s.temp({std::max(bytes, int64_t{1})}, DType::u8);
}

// Head h of sequence b.
void* head_at(const Tensor& t, int64_t row, int64_t channel) {
  return static_cast<char*>(t.data) + (row * t.ld + channel) * size_of(t.dtype);
}

}  // namespace

std::string description() {
  const Library& l = library();
  return l.usable() ? text("cuDNN ", l.version / 10000, ".", l.version / 100 % 100, ".", l.version % 100) : l.why_not;
}

bool available() {
  return library().usable();
}

bool serves_forward(const Problem& p, bool with_max_logit) {
  return fits(p) && planned(forward_key(p.d, p.q, p.k, p.v, p.o, with_max_logit));
}

bool serves_backward(const Problem& p, const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  return fits(p) && aligned(d_o) && aligned(dq) && aligned(dk) && aligned(dv) && backward_slice(p.d).heads > 0 &&
         planned(backward_key(p.d, p.q, p.k, p.v, p.o, d_o, dq, dk, dv));
}

HeadSlice backward_slice(const AttentionDims& d) {
  constexpr int64_t kBusy = 131072;  // queries: about eight tiles of 128 for each multiprocessor of an H200
  const auto divisor = [](int64_t n, int64_t most) {
    int64_t best = std::min(n, most);
    while (n % best != 0) --best;
    return best;
  };
  const int64_t fit = kBackwardWorkspace / workspace_per_head(d.T);
  if (fit < 1) return {0, 0};
  const int64_t most = std::min(fit, std::max(int64_t{1}, kBusy / d.T));
  if (most >= d.H) return {divisor(d.B, most / d.H), d.H};
  return {1, divisor(d.H, most)};
}

void attention_forward(Stream& s, const AttentionDims& d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                       Tensor max_logit) {
  const Key key = forward_key(d, q, k, v, o, !max_logit.empty());
  ScratchScope scope(s);
  const Tensor workspace = take_workspace(s, key);
  const Tensor sum_exp = max_logit ? s.temp({d.B, d.H, d.T}) : Tensor();
  if (s.planning()) return;
  Attention& attention = *Attention::of_device();
  std::unordered_map<int64_t, void*> tensors{
      {kQ, q.data}, {kK, k.data}, {kV, v.data}, {kO, o.data}, {kStats, lse.data}};
  if (max_logit) tensors[kSum] = sum_exp.data;
  attention.run(s, attention.plan(key), tensors, workspace);
  if (max_logit) merge_softmax_terms(s, d, lse, sum_exp, max_logit);
}

void attention_backward(Stream& s, const AttentionDims& d, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor o,
                        Tensor lse, Tensor q, Tensor k, Tensor v) {
  const Key key = backward_key(d, q, k, v, o, d_o, dq, dk, dv);
  ScratchScope scope(s);
  const Tensor workspace = take_workspace(s, key);
  if (s.planning()) return;
  Attention& attention = *Attention::of_device();
  const Plan& plan = attention.plan(key);
  for (int64_t b = 0; b < d.B; b += key.B) {
    for (int64_t h = 0; h < d.H; h += key.H) {
      const int64_t row = b * d.T, at_k = h * d.Dqk, at_v = h * d.Dv;
      std::unordered_map<int64_t, void*> tensors{
          {kQ, head_at(q, row, at_k)},       {kK, head_at(k, row, at_k)},
          {kV, head_at(v, row, at_v)},       {kO, head_at(o, row, at_v)},
          {kGradO, head_at(d_o, row, at_v)}, {kStats, lse.f32() + (b * d.H + h) * d.T},
          {kGradQ, head_at(dq, row, at_k)},  {kGradK, head_at(dk, row, at_k)},
          {kGradV, head_at(dv, row, at_v)}};
      attention.run(s, plan, tensors, workspace);
    }
  }
}

}  // namespace kestrel::cuda::cudnn

#else

namespace kestrel::cuda::cudnn {

std::string description() {
  return "this build has no cuDNN (KESTREL_CUDNN); the own attention kernels serve";
}
bool available() {
  return false;
}
bool serves_forward(const Problem&, bool) {
  return false;
}
bool serves_backward(const Problem&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  return false;
}
HeadSlice backward_slice(const AttentionDims&) {
  return {0, 0};
}
void attention_forward(Stream&, const AttentionDims&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
  KESTREL_CHECK(false, description());
}
void attention_backward(Stream&, const AttentionDims&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                        Tensor) {
  KESTREL_CHECK(false, description());
}

}  // namespace kestrel::cuda::cudnn

#endif
