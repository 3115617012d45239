#include "kernels/router/balancing_cpu.h"

#include <array>
#include <limits>

#include "kernels/core/math.h"
#include "kernels/core/parallel.h"
#include "kernels/router/router_cpu.h"

namespace kestrel::cpu {
namespace {

// Experts handled by one thread at a time: 16 floats are one cache line of a row, and no two threads count for the
// same expert, so counting needs neither atomics nor private copies.
constexpr int64_t kExperts = 16;

bool counted(const uint8_t* mask, int64_t n) {
  return mask == nullptr || mask[n] != 0;
}

const uint8_t* mask_of(const Tensor& valid) {
  return valid ? valid.as<uint8_t>() : nullptr;
}

// Adds to hist the bin position(n, score) of every valid token and every expert.  Positions are clamped to
// [0, bins-1] as floats (so the conversion to an integer is always defined); a NaN is counted nowhere.
template <class Position>
void count_bins(const Tensor& hist, const Tensor& in, Input kind, const uint8_t* mask, Position&& position) {
  const int64_t E = in.cols(), bins = hist.cols();
  const float last = static_cast<float>(bins - 1);
  parallel_pieces(E, kExperts, [&](int64_t begin, int64_t end) {
    const int64_t width = end - begin;
    int32_t* count = hist.i32() + begin * hist.ld;
    float s[kExperts];
    int32_t bin[kExperts], one[kExperts];
    for (int64_t n = 0; n < in.rows(); ++n) {
      if (!counted(mask, n)) continue;
      const float* row = in.f32() + n * in.ld + begin;
      if (kind == Input::logits) {
        scores(s, row, width);
      } else {
        std::copy(row, row + width, s);
      }
      for (int64_t i = 0; i < width; ++i) {
        const float x = position(n, s[i]);
        const float low = x > 0.f ? x : 0.f;
        bin[i] = static_cast<int32_t>(low < last ? low : last);
        one[i] = x == x ? 1 : 0;
      }
      for (int64_t i = 0; i < width; ++i) count[i * hist.ld + bin[i]] += one[i];
    }
  });
}

// Where the count reaches `target` from the first bin on: bin + share of that bin, in bins.  There is a count.
double position_of(const int32_t* count, int64_t bins, double target) {
  const double needed = std::ceil(target);
  int64_t before = 0;
  for (int64_t b = 0; b < bins; ++b) {
    const int64_t here = count[b];
    if (here > 0 && static_cast<double>(before + here) >= needed) {
      const double share = (target - static_cast<double>(before)) / static_cast<double>(here);
      return static_cast<double>(b) + std::clamp(share, 0.0, 1.0);
    }
    before += here;
  }
  return static_cast<double>(bins);
}

// The same from the last bin downwards.
double position_from_top(const int32_t* count, int64_t bins, double target) {
  const double needed = std::ceil(target);
  int64_t above = 0;
  for (int64_t b = bins - 1; b >= 0; --b) {
    const int64_t here = count[b];
    if (here > 0 && static_cast<double>(above + here) >= needed) {
      const double share = (target - static_cast<double>(above)) / static_cast<double>(here);
      return static_cast<double>(b + 1) - std::clamp(share, 0.0, 1.0);
    }
    above += here;
  }
  return 0.0;
}

int64_t total_of(const int32_t* count, int64_t bins) {
  int64_t n = 0;
  for (int64_t b = 0; b < bins; ++b) n += count[b];
  return n;
}

double share_of(int64_t n, int64_t k, int64_t experts) {
  return static_cast<double>(n) * static_cast<double>(k) / static_cast<double>(experts);
}

// bias[j] = value(j) - mean of the values.  The sum runs over j in fp64, so every rank finds the same bits; value(j) is
// asked twice and must not read an entry of bias other than j.
template <class Value>
void store_centred(float* bias, int64_t experts, Value&& value) {
  double sum = 0;
  for (int64_t j = 0; j < experts; ++j) sum += value(j);
  const double mean = sum / static_cast<double>(experts);
  for (int64_t j = 0; j < experts; ++j) bias[j] = static_cast<float>(value(j) - mean);
}

}  // namespace

void quantile_histogram(Tensor hist, Tensor in, Input kind, Tensor cutoff, Tensor bias, Tensor valid) {
  const QuantileBins q = quantile_bins(bias.f32(), hist.rows(), hist.cols());
  const float* alpha = cutoff.f32();
  count_bins(hist, in, kind, mask_of(valid), [=](int64_t n, float s) { return ((alpha[n] - s) - q.lo) * q.per_unit; });
}

void score_histogram(Tensor hist, Tensor in, Input kind, Tensor valid) {
  const float bins = static_cast<float>(hist.cols());
  count_bins(hist, in, kind, mask_of(valid), [=](int64_t, float s) { return s * bins; });
}

void quantile_solve(Tensor bias, Tensor hist, int64_t k, float gain, Tensor next) {
  const int64_t E = hist.rows(), bins = hist.cols();
  const QuantileBins q = quantile_bins(bias.f32(), E, bins);
  const float* b = bias.f32();
  double* value = next.as<double>();
  parallel_for(E, [&](int64_t j) {
    const int32_t* count = hist.i32() + j * hist.ld;
    const int64_t n = total_of(count, bins);
    value[j] = b[j];
    if (n == 0) return;
    const double at = position_of(count, bins, share_of(n, k, E));
    const double b_hat = static_cast<double>(q.lo) + at / static_cast<double>(q.per_unit);
    value[j] += static_cast<double>(gain) * (b_hat - value[j]);
  });
  store_centred(bias.f32(), E, [=](int64_t j) { return value[j]; });
}

void dynamic_solve(Tensor bias, Tensor hist, int64_t k, float ema) {
  const int64_t E = hist.rows(), bins = hist.cols();
  float* b = bias.f32();
  parallel_for(E, [&](int64_t j) {
    const int32_t* count = hist.i32() + j * hist.ld;
    const int64_t n = total_of(count, bins);
    if (n == 0) return;
    const double threshold = position_from_top(count, bins, share_of(n, k, E)) / static_cast<double>(bins);
    b[j] = static_cast<float>(static_cast<double>(ema) * b[j] - (1.0 - static_cast<double>(ema)) * threshold);
  });
}

void margins(Tensor out, Tensor logits, Tensor cutoff, Tensor valid) {
  const uint8_t* mask = mask_of(valid);
  const int64_t E = logits.cols();
  parallel_pieces(logits.rows(), kRouteGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* row = out.f32() + n * out.ld;
      if (!counted(mask, n)) {
        std::fill(row, row + E, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      scores(row, logits.f32() + n * logits.ld, E);
      if (!cutoff) continue;
      const float alpha = cutoff.f32()[n];
      for (int64_t e = 0; e < E; ++e) row[e] -= alpha;
    }
  });
}

namespace {

// The value of descending rank k n / E (counted from 0) in each of `width` columns, by radix selection on the order
// key: four passes, each counts one byte among the values that share the bytes fixed so far.
struct ColumnSelect {
  std::array<uint32_t, kExperts> prefix{};
  std::array<int64_t, kExperts> rank{}, n{};
  std::array<std::array<int64_t, 256>, kExperts> count;

  void pass(const Tensor& m, int64_t begin, int64_t width, int shift) {
    for (auto& c : count) c.fill(0);
    const uint32_t fixed = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int64_t r = 0; r < m.rows(); ++r) {
      const float* row = m.f32() + r * m.ld + begin;
      for (int64_t i = 0; i < width; ++i) {
        if (row[i] != row[i]) continue;
        const uint32_t key = static_cast<uint32_t>(order_key(row[i])) ^ 0x80000000u;
        const size_t c = static_cast<size_t>(i);
        if ((key & fixed) == prefix[c]) ++count[c][(key >> shift) & 255u];
      }
    }
  }
  // Fixes the byte at `shift` of column i.
  void narrow(size_t i, int shift) {
    for (int byte = 255; byte >= 0; --byte) {
      const int64_t here = count[i][static_cast<size_t>(byte)];
      if (rank[i] < here) {
        prefix[i] |= static_cast<uint32_t>(byte) << shift;
        return;
      }
      rank[i] -= here;
    }
  }
  float value(size_t i) const { return value_of_key(static_cast<int32_t>(prefix[i] ^ 0x80000000u)); }
};

}  // namespace

void exact_solve(Tensor b_hat, Tensor m, int64_t k, bool centre) {
  const int64_t E = m.cols();
  float* out = b_hat.f32();
  parallel_pieces(E, kExperts, [&](int64_t begin, int64_t end) {
    const int64_t width = end - begin;
    ColumnSelect select;
    for (int shift = 24; shift >= 0; shift -= 8) {
      select.pass(m, begin, width, shift);
      for (int64_t i = 0; i < width; ++i) {
        const size_t c = static_cast<size_t>(i);
        if (shift == 24) {
          for (int64_t x : select.count[c]) select.n[c] += x;
          select.rank[c] = select.n[c] * k / E;
        }
        if (select.n[c] > 0) select.narrow(c, shift);
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      const size_t c = static_cast<size_t>(i);
      if (select.n[c] > 0) out[begin + i] = -select.value(c);
    }
  });
  if (centre) store_centred(out, E, [=](int64_t j) { return static_cast<double>(out[j]); });
}

void sign_solve(Tensor bias, Tensor load, float rate) {
  const int64_t E = bias.numel();
  const int32_t* count = load.i32();
  float* b = bias.f32();
  int64_t total = 0;
  for (int64_t j = 0; j < E; ++j) total += count[j];
  store_centred(b, E, [=](int64_t j) {
    const int64_t missing = total - int64_t{count[j]} * E;  // E (mean - load), exact
    const double sign = missing > 0 ? 1.0 : (missing < 0 ? -1.0 : 0.0);
    return static_cast<double>(b[j]) + static_cast<double>(rate) * sign;
  });
}

double normal_upper_quantile(double p) {
  if (p > 0.5) return -normal_upper_quantile(1.0 - p);
  // Q(x) = erfc(x / sqrt 2) / 2 is convex and falling for x >= 0: Newton's iterates climb to the root from the left.
  double x = 0;
  for (int i = 0; i < 200; ++i) {
    const double excess = 0.5 * std::erfc(x * std::sqrt(0.5)) - p;
    const double density = std::exp(-0.5 * x * x) * 0.3989422804014327;
    const double step = excess / density;
    x += step;
    if (std::fabs(step) < 1e-13) break;
  }
  return x;
}

}  // namespace kestrel::cpu
