// The merges of a tokenizer as a flat hash table: (left id, right id) -> (rank, merged id).  Open addressing at a load
// of at most 1/4: a lookup, hit or miss, touches one cache line nearly always.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "src/data/hash.h"

namespace kestrel {

class PairTable {
 public:
  struct Value {
    int32_t rank;
    int32_t merged;
  };

  explicit PairTable(int64_t expected = 0)
      : slots_(std::bit_ceil(static_cast<uint64_t>(expected) * 4 + 8), Slot{kEmpty, {0, 0}}) {}

  // The first value given for a pair stays (the lowest rank, when inserted in order); false if it was there.
  // At most `expected` pairs.
  bool insert(int32_t left, int32_t right, Value value) {
    Slot& slot = slots_[find_slot(key(left, right))];
    if (slot.key != kEmpty) return false;
    slot = {key(left, right), value};
    return true;
  }

  const Value* find(int32_t left, int32_t right) const {
    const Slot& slot = slots_[find_slot(key(left, right))];
    return slot.key == kEmpty ? nullptr : &slot.value;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // no pair: ids are never negative
  struct Slot {
    uint64_t key;
    Value value;
  };
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t find_slot(uint64_t k) const {
    const size_t mask = slots_.size() - 1;
    size_t i = mix64(k) & mask;
    while (slots_[i].key != kEmpty && slots_[i].key != k) i = (i + 1) & mask;
    return i;
  }
  std::vector<Slot> slots_;
};

}  // namespace kestrel
