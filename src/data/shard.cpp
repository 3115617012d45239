#include "src/data/shard.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/core/error.h"
#include "kernels/core/parallel.h"
#include "src/checkpoint/hash.h"
#include "src/checkpoint/safetensors.h"

namespace kestrel {
namespace {

// tokens[first + i] of type S, from memory that may be unaligned, as I32.
template <class S>
void read_as(const void* tokens, int64_t first, int64_t count, int32_t* out) {
  const char* p = static_cast<const char*>(tokens) + first * static_cast<int64_t>(sizeof(S));
  for (int64_t i = 0; i < count; ++i) {
    S v;
    std::memcpy(&v, p + i * static_cast<int64_t>(sizeof(S)), sizeof(S));
    out[i] = static_cast<int32_t>(v);
  }
}

constexpr int64_t kBlock = 1 << 14;  // tokens of a scanned block

struct Piece {
  uint32_t max = 0;
  uint64_t hash = 0;
};

Piece scan_block(const int32_t* tokens, int64_t count) {
  Piece p;
  for (int64_t i = 0; i < count; ++i) p.max = std::max(p.max, static_cast<uint32_t>(tokens[i]));
  Xxh64 hash;
  hash.update(tokens, static_cast<size_t>(count) * sizeof(int32_t));
  p.hash = hash.digest();
  return p;
}

// read(first, count, out) delivers tokens of a shard of `size`.
template <class Read>
Shard::Scan scan_tokens(int64_t size, const Read& read) {
  std::vector<Piece> pieces(static_cast<size_t>((size + kBlock - 1) / kBlock));
  parallel_pieces(size, kBlock, [&](int64_t begin, int64_t end) {
    int32_t block[kBlock];
    read(begin, end - begin, block);
    pieces[static_cast<size_t>(begin / kBlock)] = scan_block(block, end - begin);
  });
  Xxh64 hash;
  for (const Piece& p : pieces) hash.update(&p.hash, sizeof p.hash);
  const auto largest =
      std::max_element(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.max < b.max; });
  const auto id_at = [&](int64_t i) {
    int32_t t = 0;
    read(i, 1, &t);
    return static_cast<uint32_t>(t);
  };
  int64_t position = (largest - pieces.begin()) * kBlock;
  while (id_at(position) != largest->max) ++position;
  return {static_cast<int64_t>(largest->max), position, hash.digest()};
}

// XXH64 over all that a Kestrel shard says: Scan::hash of its tokens, the two tensors, each after its length, and the
// metadata (-1: not there).
std::string checksum_of(const ShardContents& c, int64_t size, uint64_t token_hash) {
  Xxh64 h;
  const auto add = [&h](const auto& list) {
    const uint64_t n = list.size();
    h.update(&n, sizeof n);
    h.update(list.data(), n * sizeof(list[0]));
  };
  add(std::array{token_hash, static_cast<uint64_t>(size)});
  add(c.document_starts);
  add(c.token_bytes);
  add(std::array{c.vocab_size, c.eos_id, c.text_bytes});
  add(c.tokenizer);
  return hex(h.digest());
}

}  // namespace

std::string_view name_of(ShardFormat format) {
  switch (format) {
    case ShardFormat::kestrel:
      return "kestrel";
    case ShardFormat::llm_c:
      return "llm.c";
    case ShardFormat::megatron:
      return "megatron";
  }
  return "?";
}

void Shard::read(int64_t first, int64_t count, int32_t* out) const {
  KESTREL_CHECK(first >= 0 && count >= 0 && first + count <= size_, "tokens ", first, "+", count, " of ", size_);
  if (dtype_ == DType::u16) {
    read_as<uint16_t>(tokens_, first, count, out);
  } else {
    std::memcpy(out, static_cast<const char*>(tokens_) + first * 4, static_cast<size_t>(count) * 4);
  }
}

Shard::Scan Shard::scan() const {
  const Scan found = scan_tokens(size_, [&](int64_t first, int64_t count, int32_t* out) { read(first, count, out); });
  if (checksum_.empty()) return found;
  const std::string now = checksum_of(
      {{}, document_starts_, token_bytes_, vocab_size_, eos_id_, text_bytes_, tokenizer_}, size_, found.hash);
  if (now != checksum_) {
    throw DataError(text(path_, " is damaged: its checksum was ", checksum_, " when it was written and is ", now,
                         " now. Copy it again, or build it again with `kestrel data build`."));
  }
  return found;
}

void write_shard(const std::string& path, const ShardContents& c) {
  const auto n = static_cast<int64_t>(c.tokens.size());
  KESTREL_CHECK(n > 0 && c.vocab_size > 0, n, " tokens, vocabulary ", c.vocab_size);
  KESTREL_CHECK(c.token_bytes.empty() || static_cast<int64_t>(c.token_bytes.size()) == c.vocab_size, "token_bytes has ",
                c.token_bytes.size(), " entries, vocabulary ", c.vocab_size);
  std::vector<uint16_t> narrow;
  std::vector<NamedTensor> tensors;
  if (c.vocab_size <= 65536) {
    narrow.assign(c.tokens.begin(), c.tokens.end());
    tensors.push_back({"tokens", Tensor::of(narrow.data(), {n})});
  } else {
    tensors.push_back({"tokens", Tensor(const_cast<int32_t*>(c.tokens.data()), {n}, DType::u32)});
  }
  // 8-byte elements first: the data area starts aligned.
  if (!c.document_starts.empty()) {
    const auto docs = static_cast<int64_t>(c.document_starts.size());
    tensors.insert(tensors.begin(), {"document_starts", Tensor::of(c.document_starts.data(), {docs})});
  }
  if (!c.token_bytes.empty()) {
    tensors.insert(tensors.end() - 1, {"token_bytes", Tensor::of(c.token_bytes.data(), {c.vocab_size})});
  }
  std::map<std::string, std::string> metadata = {{"vocab_size", std::to_string(c.vocab_size)}};
  if (!c.tokenizer.empty()) metadata["tokenizer"] = c.tokenizer;
  if (c.eos_id >= 0) metadata["eos_id"] = std::to_string(c.eos_id);
  if (c.text_bytes >= 0) metadata["bytes"] = std::to_string(c.text_bytes);
  const Shard::Scan scan = scan_tokens(
      n, [&](int64_t first, int64_t count, int32_t* out) { std::copy_n(c.tokens.begin() + first, count, out); });
  metadata["shard_format"] = std::to_string(Shard::kFormat);
  metadata["checksum"] = checksum_of(c, n, scan.hash);
  write_safetensors(path, tensors, metadata);
}

}  // namespace kestrel
