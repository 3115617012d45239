#include "src/bench/op_benchmark.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "kernels/core/device.h"
#include "kernels/core/elementwise.h"
#include "kernels/core/transfer.h"
#include "kernels/gemm/gemm.h"
#include "src/bench/op_table.h"
#include "src/bench/timing.h"
#include "kernels/core/error.h"
#include "src/model/random.h"

namespace kestrel {

int64_t OpShape::operator[](const std::string& name) const {
  for (const auto& [n, value] : dims) {
    if (n == name) return value;
  }
  throw ContractError("the shape has no dimension " + name);
}

double OpTiming::bound_ms() const {
  const double product = flops > 0 ? flops / product_rate : 0;
  return 1e3 * std::max(copy_rate > 0 ? bytes / copy_rate : 0, product);
}

// ---------------------------------------------------------------------------------------------------------- the table

namespace {

const OpEntry& entry(const std::string& name) {
  for (const OpEntry& e : op_table()) {
    if (e.name == name) return e;
  }
  std::string known;
  for (const OpEntry& e : op_table()) known += (known.empty() ? "" : ", ") + e.name;
  throw ConfigError(text("there is no operation \"", name, "\" to time. Known: ", known, "."));
}

}  // namespace

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const OpEntry& e : op_table()) names.push_back(e.name);
  return names;
}

OpShape default_shape(const std::string& name, Device device) {
  OpShape shape;
  for (const OpDim& d : entry(name).dims) shape.dims.emplace_back(d.name, device == Device::cuda ? d.gpu : d.cpu);
  return shape;
}

namespace {

std::string shape_text(const OpShape& shape) {
  std::string out;
  for (const auto& [n, value] : shape.dims) out += text(out.empty() ? "" : ",", n, "=", value);
  return out;
}

// Every tensor of a case is a part of this product (KDA's states: K/64 of it), so its size can be counted.
void check_product(const OpShape& shape) {
  constexpr int64_t kMost = int64_t{1} << 53;
  int64_t room = kMost;
  for (const auto& [n, value] : shape.dims) room /= value;
  if (room >= 1) return;
  throw ConfigError(
      text("--shape: the sizes ", shape_text(shape), " multiply to more than ", kMost, " (2^53). Lower one of them."));
}

}  // namespace

OpShape parse_shape(const std::string& name, Device device, const std::string& given) {
  OpShape shape = default_shape(name, device);
  size_t begin = 0;
  while (begin < given.size()) {
    const size_t end = std::min(given.find(',', begin), given.size());
    const std::string item = given.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    const auto dim = std::find_if(shape.dims.begin(), shape.dims.end(), [&](const auto& d) { return d.first == key; });
    if (dim == shape.dims.end()) {
      std::string known;
      for (const auto& d : shape.dims) known += (known.empty() ? "" : ", ") + d.first;
      throw ConfigError(text("--shape: ", name, " has no dimension \"", key, "\". It has ", known,
                             "; write for example --shape ", shape.dims[0].first, "=", shape.dims[0].second, "."));
    }
    char* rest = nullptr;
    const long long number = std::strtoll(value.c_str(), &rest, 10);
    const int64_t most = entry(name).dims[static_cast<size_t>(dim - shape.dims.begin())].most;
    if (value.empty() || *rest != 0 || number < 1 || number > most) {
      throw ConfigError(text("--shape: ", key, " is \"", value, "\", expected an integer from 1 to ", most, "."));
    }
    dim->second = number;
  }
  check_product(shape);
  if (const std::string wrong = entry(name).check ? entry(name).check(shape) : ""; !wrong.empty()) {
    throw ConfigError(text("--shape: ", name, ": ", wrong));
  }
  return shape;
}

// ---------------------------------------------------------------------------------------------------------- operands

OpOperands::OpOperands(Stream& s, DType dtype) : s_(s), dtype_(dtype) {
  constexpr int64_t kNoise = 1 << 20;
  noise_ = s_.arena->keep({kNoise}, DType::f32, "noise");
  if (s_.planning()) return;
  std::vector<float> host(static_cast<size_t>(kNoise));
  const CounterRandom random(1, "operands");
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(random.normal(i));
  upload(s_, noise_, Tensor::of(host.data(), {kNoise}));
  wait(s_);
}

Tensor OpOperands::noise(int64_t rows, int64_t cols, DType dtype) {
  Tensor t = s_.arena->keep({rows, cols}, dtype, "operands");
  if (s_.planning()) return t;
  const Tensor flat = t.view({1, rows * cols}), from = noise_.view({1, noise_.numel()});
  for (int64_t i = 0; i < flat.cols(); i += from.cols()) {
    const int64_t n = std::min(from.cols(), flat.cols() - i);
    copy_cast(s_, flat.columns(i, n), from.columns(0, n));
  }
  return t;
}

Tensor OpOperands::zeros(int64_t rows, int64_t cols, DType dtype) {
  Tensor t = s_.arena->keep({rows, cols}, dtype, "operands");
  if (!s_.planning()) fill_zero(s_, t);
  return t;
}

Tensor OpOperands::integers(int64_t n, const std::function<int64_t(int64_t)>& value) {
  Tensor t = s_.arena->keep({n}, DType::i32, "operands");
  if (s_.planning()) return t;
  std::vector<int32_t> host(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) host[static_cast<size_t>(i)] = static_cast<int32_t>(value(i));
  upload(s_, t, Tensor::of(host.data(), {n}));
  wait(s_);
  return t;
}

// ---------------------------------------------------------------------------------------------------------- timing

namespace {

// Samples of so many calls that each lasts about 5 ms.
Timing time_calls(const Stream& s, int64_t samples, const std::function<void()>& call) {
  call();  // plans, pages, autotuned choices
  const double once = seconds_of(s, 1, call);
  const int64_t calls = std::clamp(static_cast<int64_t>(5e-3 / std::max(once, 1e-7)), int64_t{1}, int64_t{200});
  return time_samples(s, samples, calls, call);
}

// Runs `fn(stream)` over a planner and then over an arena of that size.
template <class F>
void with_arena(Device device, F&& fn) {
  const DeviceQueue queue(device);
  Arena arena(device, planned_bytes(device, fn));
  Stream s(arena);
  s.queue = queue.get();
  fn(s);
}

struct Ceilings {
  double copy = 0, product = 0;
};

// Measured once per device and dtype.
const Ceilings& ceilings(const OpOptions& o) {
  static std::vector<std::pair<std::pair<Device, DType>, Ceilings>> known;
  for (const auto& [key, value] : known) {
    if (key == std::pair(o.device, o.dtype)) return value;
  }
  const bool gpu = o.device == Device::cuda;
  Ceilings c;
  with_arena(o.device, [&](Stream& s) {
    OpOperands operands(s, o.dtype);
    const int64_t rows = gpu ? 65536 : 8192, n = gpu ? 8192 : 1024;
    const Tensor x = operands.noise(rows, 2048), y = operands.zeros(rows, 2048);
    const Tensor a = operands.noise(n, n), b = operands.noise(n, n), out = operands.zeros(n, n);
    const auto copy = [&] { copy_cast(s, y, x); };
    const auto product = [&] { gemm(s, out, a, Trans::no, b, Trans::yes); };
    if (s.planning()) return copy(), product();
    c.copy = static_cast<double>(x.bytes() + y.bytes()) / time_calls(s, 9, copy).median;
    c.product = 2.0 * static_cast<double>(n * n * n) / time_calls(s, 5, product).median;
  });
  known.emplace_back(std::pair(o.device, o.dtype), c);
  return known.back().second;
}

}  // namespace

OpTiming benchmark_op(const std::string& name, const OpShape& shape, const OpOptions& o) {
  KESTREL_CHECK(o.samples >= 1, "timing with ", o.samples, " samples");
  if (o.device == Device::cuda) use_device(0);
  const OpEntry& op = entry(name);
  OpTiming t;
  t.name = name;
  t.shape = shape;
  t.device = o.device == Device::cuda ? device_properties(0).name : "cpu";
  t.dtype = o.dtype == DType::bf16 ? "bf16" : "fp32";
  t.copy_rate = ceilings(o).copy;
  t.product_rate = ceilings(o).product;
  with_arena(o.device, [&](Stream& s) {
    OpOperands operands(s, o.dtype);
    const OpCase c = op.make(operands, shape);
    t.bytes = c.bytes;
    t.flops = c.flops;
    if (s.planning()) return c.call(s);
    const Timing timing = time_calls(s, o.samples, [&] { c.call(s); });
    t.median_ms = 1e3 * timing.median;
    t.spread = timing.spread;
  });
  return t;
}

// ---------------------------------------------------------------------------------------------------------- reports

std::string timings_text(const std::vector<OpTiming>& timings) {
  if (timings.empty()) return "";
  char line[320];
  std::snprintf(line, sizeof line, "%s, %s; copy %.3f TB/s, product %.3f TFLOP/s (measured now)\n",
                timings[0].device.c_str(), timings[0].dtype.c_str(), timings[0].copy_rate * 1e-12,
                timings[0].product_rate * 1e-12);
  std::string out = line;
  std::snprintf(line, sizeof line, "%-34s %-44s %10s %8s %10s %8s %9s %8s\n", "operation", "shape", "ms", "spread",
                "MB", "TB/s", "TFLOP/s", "of bound");
  out += line;
  for (const OpTiming& t : timings) {
    std::snprintf(line, sizeof line, "%-34s %-44s %10.4f %6.1f %% %10.1f %8.3f %9.2f %6.1f %%\n", t.name.c_str(),
                  shape_text(t.shape).c_str(), t.median_ms, 100 * t.spread, t.bytes * 1e-6,
                  t.bytes / t.median_ms * 1e-9, t.flops / t.median_ms * 1e-9, 100 * t.fraction_of_bound());
    out += line;
  }
  return out;
}

std::string timings_json(const std::vector<OpTiming>& timings) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const OpTiming& t : timings) {
    nlohmann::ordered_json shape;
    for (const auto& [n, value] : t.shape.dims) shape[n] = value;
    all.push_back({{"operation", t.name},
                   {"shape", shape},
                   {"device", t.device},
                   {"dtype", t.dtype},
                   {"median_ms", t.median_ms},
                   {"spread", t.spread},
                   {"bytes", t.bytes},
                   {"flops", t.flops},
                   {"copy_bytes_per_s", t.copy_rate},
                   {"product_flops_per_s", t.product_rate},
                   {"fraction_of_bound", t.fraction_of_bound()}});
  }
  return all.dump(2);
}

}  // namespace kestrel
