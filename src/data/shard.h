// One file of tokens, mapped into memory.  Three formats, told apart by their contents:
//
//  Kestrel    safetensors.  `tokens` [N] U16 or U32 (I32 is read too); optional `document_starts` [docs] I64 (position
//             of each document's first token, rising), `token_bytes` [vocab_size] I32 (bytes of text per token id).
//             Metadata, all strings: `vocab_size` (required), `tokenizer` (fingerprint), `eos_id`, `bytes` (UTF-8 bytes
//             of the shard's text), `shard_format` ("2") and `checksum` (over everything else here, see checksum_of in
//             shard.cpp).  What Kestrel writes has all of them but those that are not known.  A file without the last
//             two, from another program or of format 1, is read unverified.
//  llm.c      .bin: 256 x I32 header [magic, version, N, 0...], then N tokens: magic 20240520 version 1 is U16, magic
//             20240801 version 7 is U32.
//  Megatron   a .bin of raw tokens beside its .idx ("MMIDIDX\0\0", version 1, dtype, sequences, documents): U16 or I32.
//             Either of the two names opens the pair.
//
// A header that disagrees with its file, an empty shard, an unknown format or dtype throws DataError.  Damage that only
// the checksum shows is found by scan(), which every use of a shard for training or evaluation begins with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/core/tensor.h"

namespace kestrel {

enum class ShardFormat : uint8_t { kestrel, llm_c, megatron };
std::string_view name_of(ShardFormat format);

class Shard {
 public:
  static constexpr int64_t kFormat = 2;

  explicit Shard(const std::string& path);

  const std::string& path() const { return path_; }
  ShardFormat format() const { return format_; }
  DType dtype() const { return dtype_; }                       // u16, u32 or i32
  int64_t size() const { return size_; }                       // tokens
  int64_t vocab_size() const { return vocab_size_; }           // -1: the file does not say
  int64_t eos_id() const { return eos_id_; }                   // -1: none
  int64_t text_bytes() const { return text_bytes_; }           // -1: the file does not say
  const std::string& tokenizer() const { return tokenizer_; }  // fingerprint, or ""
  const std::string& checksum() const { return checksum_; }    // as recorded, or ""
  bool has_document_starts() const { return has_document_starts_; }
  const std::vector<int64_t>& document_starts() const { return document_starts_; }
  const std::vector<int32_t>& token_bytes() const { return token_bytes_; }  // [vocab_size] or empty

  // tokens [first, first + count) as I32; they must lie inside the shard.
  void read(int64_t first, int64_t count, int32_t* out) const;
  int32_t token(int64_t i) const {
    int32_t t;
    read(i, 1, &t);
    return t;
  }

  struct Scan {
    int64_t max_id;        // largest id
    int64_t max_position;  // where it is first found
    uint64_t hash;         // of all tokens, whatever their width in the file
  };
  // One pass over every token, parallel; the result does not depend on the number of threads.  A negative id (I32)
  // counts as its value + 2^32.  DataError when the shard records a checksum and it is another.
  Scan scan() const;

 private:
  friend struct ShardParser;
  std::string path_;
  ShardFormat format_ = ShardFormat::kestrel;
  DType dtype_ = DType::u16;
  int64_t size_ = 0, vocab_size_ = -1, eos_id_ = -1, text_bytes_ = -1;
  std::string tokenizer_, checksum_;
  bool has_document_starts_ = false;
  std::vector<int64_t> document_starts_;
  std::vector<int32_t> token_bytes_;
  const void* tokens_ = nullptr;         // into the mapping, maybe unaligned
  std::shared_ptr<const void> mapping_;  // keeps the file mapped
};

// What a writer knows about a shard.
struct ShardContents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> document_starts;
  std::vector<int32_t> token_bytes;  // [vocab_size] or empty
  int64_t vocab_size = 0;
  int64_t eos_id = -1;
  int64_t text_bytes = -1;
  std::string tokenizer;
};
// Writes the Kestrel format (under a temporary name, synced, renamed).  U16 when vocab_size <= 65,536, else U32.
void write_shard(const std::string& path, const ShardContents& contents);

}  // namespace kestrel
