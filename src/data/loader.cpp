#include "src/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

constexpr int32_t kNoTarget = -100;  // what the loss ignores

struct Place {
  int64_t step = 0, micro = 0;
  bool operator==(const Place&) const = default;
};

void resize(Batch& b, int64_t rows, int64_t T) {
  b.rows = rows;
  b.sequence_length = T;
  const auto n = static_cast<size_t>(rows * T);
  b.tokens.resize(n);
  b.targets.resize(n);
  b.segment.resize(n);
}

void read_into(const TokenDataset& data, int64_t row, Batch& b, int64_t i) {
  const int64_t at = i * b.sequence_length;
  data.read_row(row, b.tokens.data() + at, b.targets.data() + at, b.segment.data() + at);
}

}  // namespace

void read_rows(const TokenDataset& data, int64_t first_row, int64_t rows, Batch& out) {
  KESTREL_CHECK(first_row >= 0 && rows >= 0, "rows ", first_row, "+", rows);
  const int64_t T = data.sequence_length();
  resize(out, rows, T);
  for (int64_t i = 0; i < rows; ++i) {
    if (first_row + i < data.rows()) {
      read_into(data, first_row + i, out, i);
      continue;
    }
    const auto at = [&](std::vector<int32_t>& v) { return v.begin() + i * T; };
    std::fill_n(at(out.tokens), T, 0);
    std::fill_n(at(out.targets), T, kNoTarget);
    std::fill_n(at(out.segment), T, 0);
  }
}

// One slot is with the caller, the other is being filled by the thread for the batch expected next.
class BatchLoader::Worker {
 public:
  Worker(const TokenDataset& data, const SamplerParams& params, int64_t micro_batch_size, MicroRange mine,
         bool prefetch)
      : data_(data), sampler_(data.rows(), params), rows_(micro_batch_size), mine_(mine) {
    const int64_t G = params.global_batch_size;
    if (rows_ < 1 || G % rows_ != 0) {
      throw ConfigError(text("train.global_batch_size ", G, " is not a multiple of train.micro_batch_size ", rows_));
    }
    if (mine.first < 0 || mine.count < 1 || mine.first + mine.count > G / rows_) {
      throw ConfigError(text("micro-batches ", mine.first, " to ", mine.first + mine.count - 1, " of a step of ",
                             G / rows_, " (train.global_batch_size ", G, " / train.micro_batch_size ", rows_, ")"));
    }
    if (prefetch) thread_ = std::thread([this] { serve(); });
  }
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  const Batch& fetch(Place wanted) {
    KESTREL_CHECK(wanted.step >= 0 && wanted.micro >= 0 && (wanted.micro + 1) * rows_ <= sampler_.global_batch_size(),
                  "micro-batch ", wanted.micro, " of step ", wanted.step);
    if (!thread_.joinable()) {
      fill(wanted, current_);
      return current_;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    if (has_next_ && next_place_ == wanted) {
      std::swap(current_, next_);
    } else {
      fill(wanted, current_);  // asked out of order, or the thread failed: the error shows here, to the caller
    }
    next_place_ = after(wanted);
    has_next_ = false;
    busy_ = true;
    changed_.notify_all();
    return current_;
  }

  const RowSampler& sampler() const { return sampler_; }

 private:
  Place after(Place p) const {
    const bool more = p.micro >= mine_.first && p.micro + 1 < mine_.first + mine_.count;
    return more ? Place{p.step, p.micro + 1} : Place{p.step + 1, mine_.first};
  }

  void fill(Place p, Batch& out) const {
    resize(out, rows_, data_.sequence_length());
    for (int64_t i = 0; i < rows_; ++i) read_into(data_, sampler_.row(p.step, p.micro * rows_ + i), out, i);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return busy_ || stop_; });
      if (stop_) return;
      const Place place = next_place_;
      lock.unlock();
      bool filled = true;
      try {
        fill(place, next_);
      } catch (...) {
        filled = false;
      }
      lock.lock();
      has_next_ = filled;
      busy_ = false;
      changed_.notify_all();
    }
  }

  const TokenDataset& data_;
  RowSampler sampler_;
  int64_t rows_;
  MicroRange mine_;
  Batch current_, next_;
  Place next_place_;
  bool busy_ = false;      // the thread owns next_
  bool has_next_ = false;  // next_ holds next_place_
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

BatchLoader::BatchLoader(const TokenDataset& data, const SamplerParams& params, int64_t micro_batch_size,
                         MicroRange mine, bool prefetch)
    : worker_(std::make_unique<Worker>(data, params, micro_batch_size, mine, prefetch)) {}

BatchLoader::~BatchLoader() = default;

const Batch& BatchLoader::fetch(int64_t step, int64_t micro) {
  return worker_->fetch({step, micro});
}

const RowSampler& BatchLoader::sampler() const {
  return worker_->sampler();
}

}  // namespace kestrel
