// Opening a shard: which format it is, and whether its header tells the truth.
#include <charconv>
#include <cstring>
#include <filesystem>
#include <limits>

#include "kernels/core/error.h"
#include "src/checkpoint/safetensors.h"
#include "src/data/files.h"
#include "src/data/shard.h"

namespace kestrel {

struct ShardParser {
  Shard& s;

  [[noreturn]] void damaged(const std::string& what) const {
    throw DataError(
        text(s.path_, ": ", what, ". The file is truncated, damaged or of another format; write it again."));
  }
  template <class T>
  static T load(const char* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  void require_tokens() const {
    if (s.size_ == 0) throw DataError(text(s.path_, " has no tokens. Leave it out of the data section."));
  }

  // ---- Kestrel
  int64_t metadata(const SafetensorsFile& file, const char* key, int64_t least) const {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end()) return -1;
    int64_t v = -1;
    const char* end = it->second.data() + it->second.size();
    const auto [stop, error] = std::from_chars(it->second.data(), end, v);
    if (error != std::errc() || stop != end || v < least) {
      damaged(text("metadata ", key, " is \"", it->second, "\", not a whole number >= ", least));
    }
    return v;
  }

  // Two entries that come together, so that damage to the name of one does not pass for a file without a checksum.
  void read_checksum(const SafetensorsFile& file) const {
    const int64_t format = metadata(file, "shard_format", 1);
    if (format > Shard::kFormat) {
      throw DataError(text(s.path_, " is a shard of format ", format, ", this program reads up to ", Shard::kFormat,
                           ". Use the program that wrote it, or build it again with `kestrel data build`."));
    }
    const auto it = file.metadata().find("checksum");
    if (it != file.metadata().end()) s.checksum_ = it->second;
    if (s.checksum_.empty() == (format >= 2)) {
      damaged(text("it has ", s.checksum_.empty() ? "no checksum" : "a checksum", ", but shard_format is ",
                   format < 0 ? "missing" : std::to_string(format)));
    }
  }

  void read_tokens(const SafetensorsFile& file) {
    if (!file.has("tokens")) {
      throw DataError(
          text(s.path_, " has no tensor \"tokens\": it is no token shard (`kestrel data build` writes them)"));
    }
    const auto& e = file.entry("tokens");
    if (e.dtype != DType::u16 && e.dtype != DType::u32 && e.dtype != DType::i32) {
      throw DataError(text(s.path_, ": tokens are ", name_of(e.dtype),
                           "; U16, U32 and I32 are read. Convert them, or build the shard with `kestrel data build`."));
    }
    if (e.shape.size() != 1)
      throw DataError(text(s.path_, ": tokens have ", e.shape.size(),
                           " dimensions, not 1. Flatten them, or build the shard with `kestrel data build`."));
    s.dtype_ = e.dtype;
    s.size_ = e.shape[0];
    s.tokens_ = e.data;
    require_tokens();
  }

  void read_document_starts(const SafetensorsFile& file) {
    if (!file.has("document_starts")) return;
    const auto& e = file.entry("document_starts");
    if (e.dtype != DType::i64 || e.shape.size() != 1) damaged("document_starts is not I64 of one dimension");
    s.has_document_starts_ = true;
    s.document_starts_.resize(static_cast<size_t>(e.shape[0]));
    if (e.bytes > 0) std::memcpy(s.document_starts_.data(), e.data, static_cast<size_t>(e.bytes));
    check_document_starts();
  }
  void check_document_starts() const {
    int64_t previous = -1;
    for (int64_t d : s.document_starts_) {
      if (d <= previous || d >= s.size_) {
        damaged(text("document_starts holds ", d, " after ", previous, "; they must rise and lie below ", s.size_));
      }
      previous = d;
    }
  }

  void read_token_bytes(const SafetensorsFile& file) {
    if (!file.has("token_bytes")) return;
    const auto& e = file.entry("token_bytes");
    if (e.dtype != DType::i32 || e.shape.size() != 1 || e.shape[0] != s.vocab_size_) {
      damaged(text("token_bytes is not I32[", s.vocab_size_, "]"));
    }
    s.token_bytes_.resize(static_cast<size_t>(e.shape[0]));
    std::memcpy(s.token_bytes_.data(), e.data, static_cast<size_t>(e.bytes));
    for (int32_t n : s.token_bytes_) {
      if (n < 0) damaged(text("token_bytes holds ", n));
    }
  }

  void parse_kestrel() {
    auto file = std::make_shared<SafetensorsFile>(s.path_);
    s.format_ = ShardFormat::kestrel;
    s.vocab_size_ = metadata(*file, "vocab_size", 1);
    if (s.vocab_size_ < 0) {
      throw DataError(text(s.path_,
                           " has no metadata vocab_size: ids cannot be checked. Write it as a string, say "
                           "{\"vocab_size\": \"50257\"}."));
    }
    s.eos_id_ = metadata(*file, "eos_id", 0);
    if (s.eos_id_ >= s.vocab_size_)
      damaged(text("eos_id ", s.eos_id_, " is outside the vocabulary of ", s.vocab_size_));
    s.text_bytes_ = metadata(*file, "bytes", 0);
    if (const auto it = file->metadata().find("tokenizer"); it != file->metadata().end()) s.tokenizer_ = it->second;
    read_checksum(*file);
    read_tokens(*file);
    read_document_starts(*file);
    read_token_bytes(*file);
    s.mapping_ = std::move(file);
  }

  // ---- llm.c
  static constexpr int32_t kMagicU16 = 20240520, kMagicU32 = 20240801;
  static constexpr int64_t kLlmcHeader = 1024;

  void parse_llm_c(std::shared_ptr<MappedFile> file) {
    const int32_t magic = load<int32_t>(file->data()), version = load<int32_t>(file->data() + 4);
    const int32_t expected = magic == kMagicU16 ? 1 : 7;
    if (version != expected)
      damaged(text("llm.c magic ", magic, " goes with version ", expected, ", the header says ", version));
    s.format_ = ShardFormat::llm_c;
    s.dtype_ = magic == kMagicU16 ? DType::u16 : DType::u32;
    if (file->size() < kLlmcHeader) damaged(text("it has ", file->size(), " bytes, an llm.c header alone has 1024"));
    s.size_ = load<int32_t>(file->data() + 8);
    const int64_t expected_bytes = kLlmcHeader + s.size_ * size_of(s.dtype_);
    if (s.size_ < 0 || file->size() != expected_bytes) {
      damaged(text("its header says ", s.size_, " tokens (", expected_bytes, " bytes), the file has ", file->size()));
    }
    require_tokens();
    s.tokens_ = file->data() + kLlmcHeader;
    s.mapping_ = std::move(file);
  }

  // ---- Megatron
  static constexpr std::string_view kIndexMagic{"MMIDIDX\0\0", 9};
  static constexpr int64_t kIndexHeader = 34;

  void parse_megatron(const MappedFile& index) {
    s.format_ = ShardFormat::megatron;
    const char* p = index.data();
    if (index.size() < kIndexHeader) damaged(text("the .idx has ", index.size(), " bytes, its header alone has 34"));
    if (load<uint64_t>(p + 9) != 1) damaged(text("the .idx is version ", load<uint64_t>(p + 9), ", 1 is read"));
    const int code = load<uint8_t>(p + 17);
    if (code != 4 && code != 8) damaged(text("the .idx says dtype code ", code, "; 8 (uint16) and 4 (int32) are read"));
    s.dtype_ = code == 8 ? DType::u16 : DType::i32;
    const uint64_t sequences = load<uint64_t>(p + 18), documents = load<uint64_t>(p + 26);
    const auto available = static_cast<uint64_t>(index.size() - kIndexHeader);
    if (sequences > available / 12 || documents > available / 8 || sequences * 12 + documents * 8 > available) {
      damaged(text("the .idx says ", sequences, " sequences and ", documents, " document entries, more than its ",
                   index.size(), " bytes hold"));
    }
    auto tokens = std::make_shared<MappedFile>(std::filesystem::path(s.path_).replace_extension(".bin").string());
    const std::vector<int64_t> starts = sequence_starts(p + kIndexHeader, static_cast<int64_t>(sequences));
    s.size_ = starts.back();
    if (tokens->size() != s.size_ * size_of(s.dtype_)) {
      damaged(text("the .idx says ", s.size_, " tokens of ", size_of(s.dtype_), " bytes, the .bin has ", tokens->size(),
                   " bytes"));
    }
    require_tokens();
    read_documents(p + kIndexHeader + sequences * 12, static_cast<int64_t>(documents), starts);
    s.tokens_ = tokens->data();
    s.mapping_ = std::move(tokens);
  }

  // I32 lengths, then I64 byte offsets, which must be their running sum: [sequences + 1] positions in tokens.
  std::vector<int64_t> sequence_starts(const char* p, int64_t sequences) const {
    std::vector<int64_t> starts = {0};
    for (int64_t i = 0; i < sequences; ++i) {
      const int32_t length = load<int32_t>(p + i * 4);
      const int64_t offset = load<int64_t>(p + sequences * 4 + i * 8);
      if (length < 0 || offset != starts.back() * size_of(s.dtype_)) {
        damaged(text("sequence ", i, " of the .idx has length ", length, " at byte ", offset, ", expected byte ",
                     starts.back() * size_of(s.dtype_)));
      }
      starts.push_back(starts.back() + length);
    }
    return starts;
  }

  void read_documents(const char* p, int64_t documents, const std::vector<int64_t>& starts) {
    const auto sequences = static_cast<int64_t>(starts.size()) - 1;
    for (int64_t d = 0; d < documents; ++d) {
      const int64_t sequence = load<int64_t>(p + d * 8);
      if (sequence < 0 || sequence > sequences)
        damaged(text("document ", d, " of the .idx begins at sequence ", sequence));
      const int64_t start = starts[static_cast<size_t>(sequence)];
      // Documents of no tokens, and the closing entry, begin nothing.
      if (start < s.size_ && (s.document_starts_.empty() || start != s.document_starts_.back())) {
        s.document_starts_.push_back(start);
      }
    }
    s.has_document_starts_ = documents > 0;
    check_document_starts();
  }

  // ---- which of them
  void parse() {
    namespace fs = std::filesystem;
    const std::string extension = fs::path(s.path_).extension().string();
    auto file = std::make_shared<MappedFile>(s.path_);
    const std::string_view head(file->data(), static_cast<size_t>(std::min<int64_t>(file->size(), 9)));
    if (head == kIndexMagic) return parse_megatron(*file);
    if (extension == ".safetensors") return parse_kestrel();
    if (head.size() >= 8) {
      const int32_t magic = load<int32_t>(file->data());
      if (magic == kMagicU16 || magic == kMagicU32) return parse_llm_c(std::move(file));
    }
    const std::string index = fs::path(s.path_).replace_extension(".idx").string();
    if (extension == ".bin" && fs::exists(index)) {
      const MappedFile mapped(index);
      if (mapped.size() >= 9 && std::string_view(mapped.data(), 9) == kIndexMagic) return parse_megatron(mapped);
      throw DataError(text(index, " beside ", s.path_, " does not begin as a Megatron index (MMIDIDX)"));
    }
    if (head.size() > 8 && head[8] == '{') return parse_kestrel();
    throw DataError(text(s.path_,
                         " is no token shard: neither safetensors, nor llm.c's .bin (magic 20240520 or 20240801), "
                         "nor Megatron's .bin with its .idx beside it. `kestrel data build` makes shards from text."));
  }
};

Shard::Shard(const std::string& path) : path_(path) {
  ShardParser{*this}.parse();
}

}  // namespace kestrel
