// Counter-based random numbers: a value is a function of (seed, name, index), so initial weights depend neither on the
// order in which parameters are laid out nor on threads or ranks.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace kestrel {

// SplitMix64's output function: a bijection of 64-bit words with good avalanche (Steele, Lea, Flood 2014).
constexpr uint64_t mix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (char c : name) h = mix64(h ^ static_cast<unsigned char>(c));
  return h;
}

class CounterRandom {
 public:
  CounterRandom(uint64_t seed, std::string_view name) : key_(mix64(seed) ^ hash_name(name)) {}

  // Uniform in (0, 1), never 0 or 1.
  double uniform(uint64_t index) const {
    return (static_cast<double>(mix64(key_ ^ mix64(index)) >> 11) + 0.5) * 0x1p-53;
  }
  // Standard normal (Box-Muller; two uniforms per value).
  double normal(uint64_t index) const {
    const double r = std::sqrt(-2.0 * std::log(uniform(2 * index)));
    return r * std::cos(2.0 * std::numbers::pi * uniform(2 * index + 1));
  }

 private:
  uint64_t key_;
};

}  // namespace kestrel
