#include "src/model/weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "kernels/core/device.h"
#include "kernels/core/transfer.h"
#include "kernels/optimizer/optimizer.h"

namespace kestrel {
namespace {

float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float m = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -m : m;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? "," : "") + std::to_string(shape[i]);
  return s + "]";
}

// What does not fit, collected so that one error names several.
class Complaints {
 public:
  void add(const std::string& what) {
    if (++count_ <= 5) list_ += "\n  " + what;
  }
  void raise(const std::string& where, const std::string& way_out) const {
    if (count_ == 0) return;
    throw DataError(text("the weights in ", where, " are not this model's: ", count_, " tensor(s) differ", list_,
                         count_ > 5 ? "\n  ..." : "", "\n", way_out));
  }

 private:
  int64_t count_ = 0;
  std::string list_;
};

void convert(float* out, const SafetensorsFile::Entry& e, int64_t n, const std::string& name) {
  switch (e.dtype) {
    case DType::f32:
      std::memcpy(out, e.data, static_cast<size_t>(n) * 4);
      return;
    case DType::bf16:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<const bf16*>(e.data)[i]);
      return;
    case DType::f16:
      for (int64_t i = 0; i < n; ++i) out[i] = from_f16(static_cast<const uint16_t*>(e.data)[i]);
      return;
    default:
      throw DataError(text("tensor \"", name, "\" is stored as ", name_of(e.dtype),
                           "; weights are read as F32, BF16, F16 or MXFP4"));
  }
}

// The published A_log is padded with zeros beyond the heads.
bool zero_tail(const SafetensorsFile::Entry& e, int64_t from) {
  if (e.dtype != DType::f32) return false;
  const float* p = static_cast<const float*>(e.data);
  return std::all_of(p + from, p + e.bytes / 4, [](float x) { return x == 0.f; });
}

void unpack_mxfp4(const WeightSource& source, const std::string& name, Tensor out, Complaints& wrong) {
  const Tensor packed = source.tensor(name + "_packed"), scale = source.tensor(name + "_scale");
  if (packed.dtype != DType::u8 || scale.dtype != DType::u8 || packed.rows() != out.rows() ||
      packed.cols() * 2 != out.cols() || scale.rows() != out.rows() || scale.cols() * 32 != out.cols()) {
    wrong.add(
        text(name, ": MXFP4 pair ", packed.describe(), " and ", scale.describe(), " does not hold ", out.describe()));
    return;
  }
  Arena none(Device::cpu, 0);
  Stream s(none);
  mxfp4_unpack(s, out, packed, scale);
}

void put(ParameterStore& store, const NamedParameter& p, const Tensor& values, const std::string& where) {
  check_finite(where, p.name, values);
  if (store.allocated()) store.write(p, values.f32());
}

}  // namespace

void check_finite(const std::string& where, const std::string& name, const Tensor& t) {
  const float* x = t.f32();
  bool all = true;  // without an early end the loop is vectorised
  for (int64_t i = 0; i < t.numel(); ++i) all &= std::isfinite(x[i]);
  if (all) return;
  const int64_t at = std::find_if_not(x, x + t.numel(), [](float v) { return std::isfinite(v); }) - x;
  throw DataError(text(where, ": tensor \"", name, "\" holds ", x[at], " at element ", at, " of ", t.numel(),
                       "; values must be finite. It is damaged, or was saved by something that had diverged: use an "
                       "earlier checkpoint, or make it anew."));
}

void load_weights(ParameterStore& store, const WeightSource& source) {
  Complaints wrong;
  std::set<std::string> used;
  const std::set<std::string> mxfp4(source.mxfp4().begin(), source.mxfp4().end());
  std::vector<float> host;
  store.for_each([&](const NamedParameter& p) {
    const int64_t rows = p.member->rows, cols = p.member->block->cols;
    host.resize(static_cast<size_t>(rows * cols));
    const Tensor out = Tensor::of(host.data(), {rows, cols});
    if (mxfp4.count(p.name)) {
      used.insert({p.name + "_packed", p.name + "_scale"});
      unpack_mxfp4(source, p.name, out, wrong);
      put(store, p, out, source.path());
      return;
    }
    used.insert(p.name);
    if (!source.has(p.name)) {
      wrong.add(text(p.name, ": missing, expected ", shape_text(p.shape)));
      return;
    }
    const auto& e = source.entry(p.name);
    const bool padded = p.shape.size() == 1 && e.shape.size() == 1 && p.name.ends_with(".A_log") &&
                        e.shape[0] > p.shape[0] && zero_tail(e, p.shape[0]);
    if (e.shape != p.shape && !padded) {
      wrong.add(text(p.name, ": has shape ", shape_text(e.shape), ", expected ", shape_text(p.shape)));
      return;
    }
    convert(out.f32(), e, out.numel(), p.name);
    put(store, p, out, source.path());
  });
  store.for_each_elsewhere([&](const std::string& name) {
    if (mxfp4.count(name)) {
      used.insert({name + "_packed", name + "_scale"});
    } else if (source.has(name)) {
      used.insert(name);
    } else {
      wrong.add(text(name, ": missing"));
    }
  });
  for (const std::string& name : source.names()) {
    if (!used.count(name)) wrong.add(text(name, ": unexpected"));
  }
  wrong.raise(source.path(), "Compare its config.json with the model section of the run file.");
}

void load_weights(ParameterStore& store, const LoadedCheckpoint& checkpoint) {
  store.for_each([&](const NamedParameter& p) {
    const Tensor in = checkpoint.tensor(p.name);
    const int64_t n = p.member->rows * p.member->block->cols;
    if (in.dtype != DType::f32 || in.numel() != n) {
      throw DataError(text(checkpoint.dir, ": tensor \"", p.name, "\" is ", in.describe(), ", expected F32 ",
                           shape_text(p.shape), ". Use the run file it was made with."));
    }
    put(store, p, in, checkpoint.dir);
  });
}

void HostTensors::add(Stream& s, const std::string& name, const std::vector<int64_t>& shape, Tensor t) {
  list_.push_back({name, t.device == Device::cpu ? t : on_host(s, t, copies_.emplace_back()), shape});
}

HostTensors weights_of(Stream& s, const ParameterStore& store) {
  HostTensors out;
  store.for_each([&](const NamedParameter& p) { out.add(s, p.name, p.shape, p.rows_of(p.member->block->master)); });
  return out;
}

HostTensors weights_of(const ParameterStore& store) {
  Arena none(Device::cpu, 0);
  Stream s(none);
  return weights_of(s, store);
}

}  // namespace kestrel
