#include "kernels/router/router_cpu.h"

#include <algorithm>

#include "kernels/core/math.h"
#include "kernels/core/parallel.h"

namespace kestrel::cpu {
namespace {

constexpr int64_t kBlock = 64;  // experts scored at a time, on the stack
// The reference adds this to the sum of the chosen scores, so that scores that all underflow give weights of zero.
constexpr float kTinySum = 1e-20f;

// The best `capacity` experts offered so far, best first.  Experts are offered in index order, and a newcomer passes
// only those strictly below it: equal values stay in index order.
struct BestList {
  int32_t* key;
  int32_t* expert;
  float* score;
  int64_t capacity, size = 0;

  void offer(int32_t k, int32_t e, float s) {
    if (size == capacity) {
      if (k <= key[size - 1]) return;
      --size;
    }
    int64_t i = size++;
    for (; i > 0 && key[i - 1] < k; --i) {
      key[i] = key[i - 1];
      expert[i] = expert[i - 1];
      score[i] = score[i - 1];
    }
    key[i] = k;
    expert[i] = e;
    score[i] = s;
  }
};

// Offers all experts of one token; with `positive_only` just those whose biased score is above zero.
void fill_list(BestList& best, const float* logits, const float* bias, int64_t experts, bool positive_only) {
  float s[kBlock];
  int32_t key[kBlock];
  const int32_t zero = order_key(0.f);
  for (int64_t first = 0; first < experts; first += kBlock) {
    const int64_t n = std::min(kBlock, experts - first);
    scores(s, logits + first, n);
    for (int64_t i = 0; i < n; ++i) key[i] = order_key(s[i] + bias[first + i]);
    for (int64_t i = 0; i < n; ++i) {
      if (!positive_only || key[i] > zero) best.offer(key[i], static_cast<int32_t>(first + i), s[i]);
    }
  }
}

struct SlotRow {
  int32_t* index;
  float* weight;
  float* score;
};

// Writes the first `used` experts of the list, then empty slots.
void write_slots(const Routing& r, const SlotRow& row, const BestList& best, int64_t used) {
  float sum = kTinySum;
  for (int64_t j = 0; j < used; ++j) sum += best.score[j];
  const float factor = r.renormalize ? r.scaling / sum : r.scaling;
  for (int64_t j = 0; j < r.slots; ++j) {
    row.index[j] = j < used ? best.expert[j] : -1;
    row.score[j] = j < used ? best.score[j] : 0.f;
    row.weight[j] = j < used ? best.score[j] * factor : 0.f;
  }
}

float* row_f(const Tensor& t, int64_t n) {
  return t.f32() + n * t.ld;
}

void count_load(const Tensor& load, const Tensor& index) {
  int32_t* count = load.i32();
  for (int64_t n = 0; n < index.rows(); ++n) {
    const int32_t* row = index.i32() + n * index.ld;
    for (int64_t j = 0; j < index.cols(); ++j) {
      if (row[j] >= 0) ++count[row[j]];
    }
  }
}

}  // namespace

void scores(float* s, const float* logits, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) s[i] = sigmoid_f(logits[i]);
}

void route_forward(const Routing& r, Tensor index, Tensor weight, Tensor score, Tensor cutoff, Tensor load,
                   Tensor logits, Tensor bias, Tensor valid, Tensor list, Tensor list_scores) {
  const int64_t capacity = list_capacity(r);
  const uint8_t* mask = valid ? valid.as<uint8_t>() : nullptr;
  parallel_pieces(logits.rows(), kRouteGrain, [&](int64_t begin, int64_t end) {
    const int64_t piece = begin / kRouteGrain;
    int32_t* keys = list.i32() + piece * list.ld;
    BestList best{keys, keys + capacity, row_f(list_scores, piece), capacity};
    for (int64_t n = begin; n < end; ++n) {
      best.size = 0;
      const bool routed = mask == nullptr || mask[n] != 0;
      if (routed) fill_list(best, row_f(logits, n), bias.f32(), r.experts, r.threshold);
      const SlotRow row{index.i32() + n * index.ld, row_f(weight, n), row_f(score, n)};
      write_slots(r, row, best, std::min(best.size, r.slots));
      if (r.threshold) continue;
      const float none = routed ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
      cutoff.f32()[n] = best.size > r.k ? value_of_key(best.key[r.k]) : none;
    }
  });
  count_load(load, index);
}

void route_backward(const Routing& r, Tensor dlogits, Tensor dweight, Tensor index, Tensor score) {
  parallel_pieces(dlogits.rows(), kRouteGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* dz = row_f(dlogits, n);
      std::fill(dz, dz + r.experts, 0.f);
      const int32_t* id = index.i32() + n * index.ld;
      const float *s = row_f(score, n), *dw = row_f(dweight, n);
      float sum = kTinySum, dot = 0.f;  // sum of scores, <dw, s>
      for (int64_t j = 0; j < r.slots; ++j) {
        if (id[j] < 0) continue;
        sum += s[j];
        dot += dw[j] * s[j];
      }
      const float mean = r.renormalize ? dot / sum : 0.f;
      const float factor = r.renormalize ? r.scaling / sum : r.scaling;
      for (int64_t j = 0; j < r.slots; ++j) {
        if (id[j] >= 0) dz[id[j]] = factor * (dw[j] - mean) * s[j] * (1.f - s[j]);
      }
    }
  });
}

namespace {

// One token of the auxiliary loss: returns sum_e f_e p_e and adds its gradient to dz.
//   p_e = s_e / S;   d(sum_e f_e p_e)/ds_j = (f_j - sum_e f_e p_e) / S
float aux_row(float* dz, const float* logits, const int32_t* load, int64_t experts, float f_scale, float grad_scale) {
  float s[kBlock];
  float sum = kTinySum, weighted = 0.f;
  for (int64_t first = 0; first < experts; first += kBlock) {
    const int64_t n = std::min(kBlock, experts - first);
    scores(s, logits + first, n);
#pragma omp simd reduction(+ : sum, weighted)
    for (int64_t i = 0; i < n; ++i) {
      sum += s[i];
      weighted += static_cast<float>(load[first + i]) * s[i];
    }
  }
  const float value = f_scale * weighted / sum;
  const float factor = grad_scale / sum;
  for (int64_t first = 0; first < experts; first += kBlock) {
    const int64_t n = std::min(kBlock, experts - first);
    scores(s, logits + first, n);
    for (int64_t i = 0; i < n; ++i) {
      const float f = f_scale * static_cast<float>(load[first + i]);
      dz[first + i] += factor * (f - value) * s[i] * (1.f - s[i]);
    }
  }
  return value;
}

}  // namespace

void aux_loss(float coefficient, float scale, Tensor loss, Tensor dlogits, Tensor logits, Tensor load, int64_t k,
              Tensor valid, Tensor partial) {
  const int64_t rows = logits.rows(), experts = logits.cols();
  const uint8_t* mask = valid ? valid.as<uint8_t>() : nullptr;
  const int64_t counted = mask == nullptr ? rows : std::count_if(mask, mask + rows, [](uint8_t m) { return m != 0; });
  if (counted == 0) return;
  const float per_token = coefficient * static_cast<float>(experts) / static_cast<float>(counted);
  const float f_scale = 1.f / (static_cast<float>(counted) * static_cast<float>(k));
  parallel_pieces(rows, kRouteGrain, [&](int64_t begin, int64_t end) {
    float sum = 0.f;
    for (int64_t n = begin; n < end; ++n) {
      if (mask != nullptr && mask[n] == 0) continue;
      sum += aux_row(row_f(dlogits, n), row_f(logits, n), load.i32(), experts, f_scale, scale * per_token);
    }
    partial.f32()[begin / kRouteGrain] = sum;
  });
  double total = 0;
  for (int64_t p = 0; p < partial.numel(); ++p) total += partial.f32()[p];
  loss.f32()[0] += static_cast<float>(total * per_token);
}

}  // namespace kestrel::cpu
