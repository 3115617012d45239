// Pieces of text already encoded -> their ids.  Holds up to a fixed number of entries and starts afresh when full:
// words are so unevenly frequent that the common ones are back at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/data/hash.h"

namespace kestrel {

class PieceCache {
 public:
  static constexpr size_t kLongest = 64;  // bytes of a piece worth keeping

  PieceCache() : slots_(kSlots) {}

  // Looks `piece` up; a hit is a span that stays valid until the next put.
  bool get(std::string_view piece, std::span<const int32_t>& ids) const {
    const uint64_t h = hash_bytes(piece.data(), piece.size()) | 1;
    for (size_t i = h >> kShift;; i = (i + 1) & (kSlots - 1)) {
      const Slot& s = slots_[i];
      if (s.hash == 0) return false;
      if (s.hash == h && s.length == piece.size() &&
          std::memcmp(bytes_.data() + s.bytes, piece.data(), s.length) == 0) {
        ids = {ids_.data() + s.ids, s.count};
        return true;
      }
    }
  }

  // Remembers a piece that get did not find.
  void put(std::string_view piece, std::span<const int32_t> ids) {
    if (used_ >= kSlots / 2) clear();
    const uint64_t h = hash_bytes(piece.data(), piece.size()) | 1;
    size_t i = h >> kShift;
    while (slots_[i].hash != 0) i = (i + 1) & (kSlots - 1);
    slots_[i] = {h, static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(ids_.size()),
                 static_cast<uint32_t>(piece.size()), static_cast<uint32_t>(ids.size())};
    bytes_.append(piece);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    ++used_;
  }

 private:
  static constexpr int kBits = 16;
  static constexpr size_t kSlots = size_t{1} << kBits;
  static constexpr int kShift = 64 - kBits;
  struct Slot {
    uint64_t hash = 0;  // 0: free
    uint32_t bytes = 0, ids = 0, length = 0, count = 0;
  };
  void clear() {
    slots_.assign(kSlots, Slot{});
    bytes_.clear();
    ids_.clear();
    used_ = 0;
  }
  std::vector<Slot> slots_;
  std::string bytes_;
  std::vector<int32_t> ids_;
  size_t used_ = 0;
};

}  // namespace kestrel
