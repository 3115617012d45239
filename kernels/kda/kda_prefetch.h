// Rows of chunks to come, brought into the cache little by little while the present chunk is computed.  A head's rows
// lie far apart, so the hardware does not foresee them; asked for all at once they queue up and the computation waits.
#pragma once

#include "kernels/kda/kda_chain.h"

namespace kestrel::cpu::kda {

class Prefetcher {
 public:
  // Forgets what is left; the new rows will be spread over `calls` calls of some().
  void start(int64_t calls) {
    streams_ = current_ = rows_ = 0;
    calls_ = calls > 1 ? calls : 1;
  }

  // Rows [begin, end) of n floats; those before 0 and from T on do not exist.
  void add(Rows rows, int64_t begin, int64_t end, int64_t T, int64_t n, bool write) {
    begin = begin < 0 ? 0 : begin;
    end = end > T ? T : end;
    if (begin >= end || streams_ == kMost) return;
    list_[streams_++] = {rows[begin], rows.ld, n, end - begin, write};
    rows_ += end - begin;
  }

  void some() {
    for (int64_t n = (rows_ + calls_ - 1) / calls_; n > 0 && current_ < streams_; --n) {
      Stream& s = list_[current_];
      for (int64_t c = 0; c < s.n; c += kLine) {
        if (s.write) {
          __builtin_prefetch(s.row + c, 1);
        } else {
          __builtin_prefetch(s.row + c, 0);
        }
      }
      s.row += s.ld;
      if (--s.left == 0) ++current_;
    }
  }

 private:
  struct Stream {
    const float* row;
    int64_t ld, n, left;
    bool write;
  };
  static constexpr int64_t kMost = 12, kLine = 16;
  Stream list_[kMost] = {};
  int64_t streams_ = 0, current_ = 0, rows_ = 0, calls_ = 1;
};

}  // namespace kestrel::cpu::kda
