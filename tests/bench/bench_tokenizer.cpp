// Speed of the tokenizer and of the data path:  bench_tokenizer TEXT.txt [vocab_size]
// (TEXT: scripts/prepare_kjv.sh's output, for figures that can be compared.)
#include <omp.h>
#include <stdlib.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/core/error.h"
#include "src/checkpoint/files.h"
#include "src/data/bpe_train.h"
#include "src/data/dataset.h"
#include "src/data/loader.h"

namespace kestrel {
namespace {

template <class F>
double seconds(F&& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Tokenizer bench_training(const std::vector<std::string>& text, int64_t vocab) {
  BpeTrainer trainer({.vocab_size = vocab});
  const double count = seconds([&] { trainer.add(text); });
  std::optional<Tokenizer> trained;
  const double merge = seconds([&] { trained = trainer.train(); });
  const Tokenizer t = std::move(*trained);
  std::printf("train to %lld tokens   count %.2f s (%d threads), merge %.2f s\n",
              static_cast<long long>(t.vocab_size()), count, omp_get_max_threads(), merge);
  return t;
}

void bench_encoding(const Tokenizer& t, const std::string& text) {
  const double mb = static_cast<double>(text.size()) * 1e-6;
  Encoder encoder(t);
  std::vector<int32_t> ids;
  const double cold = seconds([&] { encoder.encode(text, ids); });
  ids.clear();
  const double warm = seconds([&] { encoder.encode(text, ids); });
  std::printf("encode, one thread     %.1f MB/s cold, %.1f MB/s warm (%.3f bytes per token)\n", mb / cold, mb / warm,
              mb * 1e6 / static_cast<double>(ids.size()));
  std::string out;
  const double decode = seconds([&] { out = t.decode(ids); });
  if (out != text) throw DataError("decode(encode(text)) is not the text");
  std::printf("decode, one thread     %.0f MB/s\n", mb / decode);
}

// Pieces that never repeat: what the cache cannot help with.
void bench_uncached(const Tokenizer& t) {
  std::string s;
  uint64_t x = 1;
  while (s.size() < 4'000'000) {
    s += ' ';
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    for (uint64_t r = x >> 8, i = 0; i < 8; ++i, r /= 26) s += static_cast<char>('a' + r % 26);
  }
  std::vector<int32_t> ids;
  const double time = seconds([&] { Encoder(t).encode(s, ids); });
  std::printf("encode, random words   %.1f MB/s\n", static_cast<double>(s.size()) * 1e-6 / time);
}

void bench_loader() {
  std::string name = (std::filesystem::temp_directory_path() / "kestrel_bench_XXXXXX").string();
  if (!mkdtemp(name.data())) throw DataError("cannot make a folder in " + name);
  ShardContents c;
  c.vocab_size = 50000;
  for (int64_t i = 0; i < 50'000'000; ++i) c.tokens.push_back(static_cast<int32_t>(i * 7919 % 50000));
  write_shard(name + "/a.safetensors", c);
  const double open = seconds([&] { TokenDataset({name + "/a.safetensors"}, 2048, 50000); });
  std::printf("open and check 50 M tokens (100 MB)   %.3f s, %.1f GB/s (%d threads)\n", open, 0.1 / open,
              omp_get_max_threads());
  const TokenDataset data({name + "/a.safetensors"}, 2048, 50000);
  BatchLoader loader(data, {.global_batch_size = 32, .shuffle = true, .seed = 1}, 32, {}, /*prefetch=*/false);
  const double load = seconds([&] {
    for (int64_t step = 0; step < 200; ++step) loader.fetch(step, 0);
  });
  std::printf("load shuffled rows of 2048, no prefetch   %.0f M tokens/s\n", 200 * 32 * 2048 * 1e-6 / load);
  std::filesystem::remove_all(name);
}

}  // namespace
}  // namespace kestrel

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_tokenizer TEXT.txt [vocab_size]\n");
    return 2;
  }
  try {
    const std::string text = kestrel::read_file(argv[1]);
    const kestrel::Tokenizer t = kestrel::bench_training({text}, argc > 2 ? std::atoll(argv[2]) : 8192);
    kestrel::bench_encoding(t, text);
    kestrel::bench_uncached(t);
    kestrel::bench_loader();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
