#include "src/data/shard.h"

#include <omp.h>

#include <cstring>

#include "kernels/core/error.h"
#include "src/checkpoint/safetensors.h"
#include "tests/src/data/scratch_folder.h"

namespace kestrel {
namespace {

using test::message_of;
using test::ScratchFolder;

template <class... T>
std::string pack(T... values) {
  std::string s;
  (s.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
  return s;
}

std::vector<int32_t> all(const Shard& s) {
  std::vector<int32_t> v(static_cast<size_t>(s.size()));
  s.read(0, s.size(), v.data());
  return v;
}

std::string open_error(const std::string& path) {
  return message_of<DataError>([&] { Shard{path}; });
}

TEST(Shard, WrittenIsRead) {
  const ScratchFolder dir;
  for (int64_t vocab : {300, 65536, 65537, 163840}) {
    ShardContents c;
    c.tokens = {0, 299, 5, 1, static_cast<int32_t>(vocab - 1), 2};
    c.document_starts = {0, 4};
    c.token_bytes.assign(static_cast<size_t>(vocab), 3);
    c.vocab_size = vocab;
    c.eos_id = 1;
    c.text_bytes = 12;
    c.tokenizer = "abc";
    write_shard(dir / "s.safetensors", c);
    const Shard s(dir / "s.safetensors");
    EXPECT_EQ(s.format(), ShardFormat::kestrel);
    EXPECT_EQ(s.dtype(), vocab <= 65536 ? DType::u16 : DType::u32);
    EXPECT_EQ(all(s), c.tokens);
    EXPECT_EQ(s.document_starts(), c.document_starts);
    EXPECT_EQ(s.token_bytes(), c.token_bytes);
    EXPECT_EQ(s.vocab_size(), vocab);
    EXPECT_EQ(s.eos_id(), 1);
    EXPECT_EQ(s.text_bytes(), 12);
    EXPECT_EQ(s.tokenizer(), "abc");
    EXPECT_EQ(s.token(4), vocab - 1);
  }
}

TEST(Shard, OptionalPartsMayBeMissingAndI32IsRead) {
  const ScratchFolder dir;
  std::vector<int32_t> tokens = {7, 8, 9};
  write_safetensors(dir / "s.safetensors", {{"tokens", Tensor::of(tokens.data(), {3})}}, {{"vocab_size", "10"}});
  const Shard s(dir / "s.safetensors");
  EXPECT_EQ(s.dtype(), DType::i32);
  EXPECT_EQ(all(s), tokens);
  EXPECT_EQ(s.eos_id(), -1);
  EXPECT_EQ(s.text_bytes(), -1);
  EXPECT_FALSE(s.has_document_starts());
  EXPECT_TRUE(s.token_bytes().empty());
}

TEST(Shard, ScanFindsTheLargestIdWhateverTheThreads) {
  const ScratchFolder dir;
  ShardContents c;
  for (int32_t i = 0; i < 100000; ++i) c.tokens.push_back(i * 7919 % 60000);
  c.tokens[70001] = c.tokens[90001] = 60123;
  c.vocab_size = 65536;
  write_shard(dir / "narrow.safetensors", c);
  c.vocab_size = 100000;
  write_shard(dir / "wide.safetensors", c);
  const Shard narrow(dir / "narrow.safetensors"), wide(dir / "wide.safetensors");
  const int threads = omp_get_max_threads();
  for (int n : {1, 2, 3}) {
    omp_set_num_threads(n);
    const auto a = narrow.scan(), b = wide.scan();
    EXPECT_EQ(a.max_id, 60123);
    EXPECT_EQ(a.max_position, 70001);
    EXPECT_EQ(a.hash, b.hash);  // of the ids, not of their width
  }
  omp_set_num_threads(threads);
  c.tokens[50000] ^= 1;
  write_shard(dir / "other.safetensors", c);
  EXPECT_NE(Shard(dir / "other.safetensors").scan().hash, wide.scan().hash);
}

// A flipped bit anywhere in the file is found when the shard is used: by the header's own checks or by the checksum.
TEST(Shard, EveryFlippedBitIsFound) {
  const ScratchFolder dir;
  ShardContents c;
  c.tokens = {0, 8, 5, 1, 9, 2};
  c.document_starts = {0, 4};
  c.token_bytes.assign(10, 3);
  c.vocab_size = 10;
  c.eos_id = 1;
  c.text_bytes = 12;
  c.tokenizer = "abc";
  write_shard(dir / "s.safetensors", c);
  EXPECT_EQ(Shard(dir / "s.safetensors").scan().max_id, 9);
  const std::string good = ScratchFolder::read(dir / "s.safetensors");
  const size_t padding = good.find_last_of('}') + 1, data = good.size() - (2 * 8 + 10 * 4 + 6 * 2);
  ASSERT_EQ(data % 64, 0u);
  for (size_t i = 0; i < good.size(); ++i) {
    if (i >= padding && i < data) continue;  // blanks that say nothing
    std::string bad = good;
    bad[i] ^= 4;
    EXPECT_THROW(Shard(dir.write("bad.safetensors", bad)).scan(), DataError) << "byte " << i;
  }
}

TEST(Shard, ChecksumIsOptionalUntilFormatTwo) {
  const ScratchFolder dir;
  std::vector<int32_t> tokens = {7, 8, 9};
  const auto path = dir / "s.safetensors";
  const auto write = [&](std::map<std::string, std::string> metadata) {
    metadata["vocab_size"] = "10";
    write_safetensors(path, {{"tokens", Tensor::of(tokens.data(), {3})}}, metadata);
  };
  write({});
  EXPECT_EQ(Shard(path).scan().max_id, 9);
  write({{"shard_format", "2"}});
  EXPECT_CONTAINS(open_error(path), "no checksum");
  write({{"shard_format", "3"}, {"checksum", "0123456789abcdef"}});
  EXPECT_CONTAINS(open_error(path), "format 3");
  write({{"checksum", "0123456789abcdef"}});
  EXPECT_CONTAINS(open_error(path), "shard_format is missing");
  write({{"shard_format", "2"}, {"checksum", "0123456789abcdef"}});
  EXPECT_CONTAINS(message_of<DataError>([&] { Shard(path).scan(); }), "0123456789abcdef");
}

TEST(Shard, ANegativeIdIsTooLarge) {
  const ScratchFolder dir;
  std::vector<int32_t> tokens = {7, -1, 9};
  write_safetensors(dir / "s.safetensors", {{"tokens", Tensor::of(tokens.data(), {3})}}, {{"vocab_size", "10"}});
  EXPECT_EQ(Shard(dir / "s.safetensors").scan().max_id, 4294967295);
}

TEST(Shard, BadSafetensorsAreNamed) {
  const ScratchFolder dir;
  const std::string path = dir / "s.safetensors";
  std::vector<int32_t> tokens = {1, 2, 3};
  std::vector<float> floats = {1, 2, 3};
  std::vector<int64_t> starts = {0, 3};
  const NamedTensor good{"tokens", Tensor::of(tokens.data(), {3})};
  const auto error = [&](const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata) {
    write_safetensors(path, tensors, metadata);
    return open_error(path);
  };
  const std::map<std::string, std::string> vocab = {{"vocab_size", "10"}};
  EXPECT_CONTAINS(error({good}, {}), "vocab_size");
  EXPECT_CONTAINS(error({good}, {{"vocab_size", "ten"}}), "ten");
  EXPECT_CONTAINS(error({good}, {{"vocab_size", "0"}}), "\"0\"");
  EXPECT_CONTAINS(error({good}, {{"vocab_size", "10"}, {"eos_id", "10"}}), "eos_id 10");
  EXPECT_CONTAINS(error({good}, {{"vocab_size", "10"}, {"bytes", "-5"}}), "bytes");
  EXPECT_CONTAINS(error({{"token", good.tensor}}, vocab), "tokens");
  EXPECT_CONTAINS(error({{"tokens", Tensor::of(floats.data(), {3})}}, vocab), "F32");
  EXPECT_CONTAINS(error({{"tokens", Tensor::of(tokens.data(), {1, 3})}}, vocab), "2 dimensions");
  EXPECT_CONTAINS(error({{"tokens", Tensor::of(tokens.data(), {0})}}, vocab), "no tokens");
  EXPECT_CONTAINS(error({good, {"document_starts", Tensor::of(starts.data(), {2})}}, vocab), "document_starts holds 3");
  starts = {1, 1};
  EXPECT_CONTAINS(error({good, {"document_starts", Tensor::of(starts.data(), {2})}}, vocab), "1 after 1");
  EXPECT_CONTAINS(error({good, {"document_starts", Tensor::of(tokens.data(), {3})}}, vocab), "I64");
  EXPECT_CONTAINS(error({good, {"token_bytes", Tensor::of(tokens.data(), {3})}}, vocab), "token_bytes");
}

TEST(Shard, TruncatedAndForeignFilesAreNamed) {
  const ScratchFolder dir;
  ShardContents c;
  c.tokens = {1, 2, 3, 4};
  c.vocab_size = 10;
  write_shard(dir / "s.safetensors", c);
  const std::string bytes = ScratchFolder::read(dir / "s.safetensors");
  EXPECT_CONTAINS(open_error(dir.write("short.safetensors", bytes.substr(0, bytes.size() - 2))), "short.safetensors");
  EXPECT_CONTAINS(open_error(dir.write("long.safetensors", bytes + "xx")), "long.safetensors");
  EXPECT_CONTAINS(open_error(dir.write("text.txt", "In the beginning")), "no token shard");
  EXPECT_CONTAINS(open_error(dir.write("empty.bin", "")), "empty");
  EXPECT_CONTAINS(open_error(dir.write("raw.bin", std::string(4096, 'x'))), "no token shard");
  EXPECT_CONTAINS(open_error(dir / "none.bin"), "none.bin");
  EXPECT_CONTAINS(open_error(dir / ""), "not a regular file");
  EXPECT_EQ(all(Shard(dir.write("renamed.shard", bytes))), c.tokens);  // told by content
}

std::string llm_c(int32_t magic, int32_t version, int32_t n, const std::string& tokens) {
  std::string s = pack(magic, version, n);
  s.resize(1024, '\0');
  return s + tokens;
}

TEST(LlmC, BothMagicsAreRead) {
  const ScratchFolder dir;
  const Shard narrow(dir.write("a.bin", llm_c(20240520, 1, 3, pack(uint16_t{50256}, uint16_t{0}, uint16_t{65535}))));
  EXPECT_EQ(narrow.format(), ShardFormat::llm_c);
  EXPECT_EQ(all(narrow), (std::vector<int32_t>{50256, 0, 65535}));
  EXPECT_EQ(narrow.vocab_size(), -1);
  const Shard wide(dir.write("b.bin", llm_c(20240801, 7, 2, pack(uint32_t{128000}, uint32_t{9}))));
  EXPECT_EQ(all(wide), (std::vector<int32_t>{128000, 9}));
  EXPECT_EQ(wide.dtype(), DType::u32);
}

TEST(LlmC, LyingHeadersAreNamed) {
  const ScratchFolder dir;
  const std::string two = pack(uint16_t{1}, uint16_t{2});
  EXPECT_CONTAINS(open_error(dir.write("a.bin", llm_c(20240520, 1, 3, two))), "says 3 tokens");
  EXPECT_CONTAINS(open_error(dir.write("b.bin", llm_c(20240520, 1, 1, two))), "says 1 tokens");
  EXPECT_CONTAINS(open_error(dir.write("c.bin", llm_c(20240520, 1, -2, two))), "says -2 tokens");
  EXPECT_CONTAINS(open_error(dir.write("d.bin", llm_c(20240520, 2, 2, two))), "version 1");
  EXPECT_CONTAINS(open_error(dir.write("e.bin", llm_c(20240801, 1, 1, two))), "version 7");
  EXPECT_CONTAINS(open_error(dir.write("f.bin", llm_c(20240520, 1, 0, ""))), "no tokens");
  EXPECT_CONTAINS(open_error(dir.write("g.bin", llm_c(20240520, 1, 2, two).substr(0, 500))), "500");
}

// Documents of 3, 2 and 4 tokens, the middle one in two sequences; a closing entry after the last.
std::string megatron_index(uint8_t code, int64_t bytes, const std::string& magic = std::string("MMIDIDX\0\0", 9)) {
  return magic + pack(uint64_t{1}, code, uint64_t{4}, uint64_t{4}) +
         pack(int32_t{3}, int32_t{1}, int32_t{1}, int32_t{4}) + pack(int64_t{0}, 3 * bytes, 4 * bytes, 5 * bytes) +
         pack(int64_t{0}, int64_t{1}, int64_t{3}, int64_t{4});
}

TEST(Megatron, IndexAndTokensAreRead) {
  const ScratchFolder dir;
  std::string narrow, wide;
  std::vector<int32_t> expected;
  for (int32_t i = 0; i < 9; ++i) {
    narrow += pack(static_cast<uint16_t>(65000 + i));
    wide += pack(65000 + i);
    expected.push_back(65000 + i);
  }
  dir.write("a.idx", megatron_index(8, 2));
  dir.write("a.bin", narrow);
  dir.write("b.idx", megatron_index(4, 4));
  dir.write("b.bin", wide);
  for (const char* name : {"a.bin", "a.idx", "b.bin", "b.idx"}) {
    const Shard s(dir / name);
    EXPECT_EQ(s.format(), ShardFormat::megatron);
    EXPECT_EQ(all(s), expected);
    EXPECT_EQ(s.document_starts(), (std::vector<int64_t>{0, 3, 5})) << name;
  }
}

TEST(Megatron, LyingIndexesAreNamed) {
  const ScratchFolder dir;
  const std::string tokens(18, '\1'), good = megatron_index(8, 2);
  int n = 0;
  const auto error = [&](const std::string& index, const std::string& bin) {
    const std::string name = std::to_string(n++);
    dir.write(name + ".idx", index);
    return open_error(dir.write(name + ".bin", bin));
  };
  const auto with = [&](size_t at, const std::string& bytes) {
    std::string s = good;
    return s.replace(at, bytes.size(), bytes);
  };
  EXPECT_CONTAINS(error(good, tokens.substr(0, 16)), "16 bytes");
  EXPECT_CONTAINS(error(good.substr(0, 60), tokens), "60 bytes");
  EXPECT_CONTAINS(error(good.substr(0, 20), tokens), "34");
  EXPECT_CONTAINS(error(with(9, pack(uint64_t{2})), tokens), "version 2");
  EXPECT_CONTAINS(error(with(17, pack(uint8_t{7})), tokens), "dtype code 7");
  EXPECT_CONTAINS(error(with(18, pack(uint64_t{1} << 62)), tokens), "sequences");
  EXPECT_CONTAINS(error(with(34, pack(int32_t{-3})), tokens), "length -3");
  EXPECT_CONTAINS(error(with(34 + 16 + 8, pack(int64_t{8})), tokens), "at byte 8");
  EXPECT_CONTAINS(error(with(34 + 48 + 8, pack(int64_t{5})), tokens), "sequence 5");
  EXPECT_CONTAINS(error("not an index at all", tokens), "MMIDIDX");
  dir.write("alone.idx", good);
  EXPECT_CONTAINS(open_error(dir / "alone.idx"), "alone.bin");
}

}  // namespace
}  // namespace kestrel
