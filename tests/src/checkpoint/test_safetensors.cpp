#include <sys/stat.h>

#include <random>

#include "tests/src/checkpoint/temp_dir.h"
#include "tests/support.h"

namespace kestrel {
namespace {

using test::error_of;
using test::slurp;
using test::spill;
using test::TempDir;

std::string raw(const std::string& header, size_t data_bytes) {
  const uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + std::string(data_bytes, '\x01');
}

// The message of opening a file with this header and data.
std::string refusal(const std::string& header, size_t data_bytes) {
  TempDir dir;
  spill(dir.path("x.safetensors"), raw(header, data_bytes));
  const std::string why = error_of<DataError>([&] { SafetensorsFile f(dir.path("x.safetensors")); });
  EXPECT_NE(why.find(dir.path("x.safetensors")), std::string::npos) << "the path is missing: " << why;
  return why;
}

void expect_in(const std::string& part, const std::string& whole) {
  EXPECT_NE(whole.find(part), std::string::npos) << "\"" << part << "\" is not in: " << whole;
}

TEST(Safetensors, RoundTripKeepsBitsShapesAndMetadata) {
  TempDir dir;
  test::Buffer a({3, 5}), b({2, 1, 3}, DType::u8), c({7}, DType::i64), none({0, 4});
  a.normal(1);
  for (int i = 0; i < 6; ++i) static_cast<uint8_t*>(b->data)[i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 7; ++i) static_cast<int64_t*>(c->data)[i] = -i;
  write_safetensors(dir.path("x.safetensors"),
                    {{"odd", b, {}}, {"a", a, {}}, {"c", c, {7, 1, 1, 1, 1}}, {"none", none, {}}}, {{"k", "v\n\"é"}});
  SafetensorsFile f(dir.path("x.safetensors"));
  EXPECT_EQ(f.entries().size(), 4u);
  EXPECT_EQ(f.metadata().at("k"), "v\n\"é");
  EXPECT_EQ(f.entry("a").shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(f.entry("c").shape, (std::vector<int64_t>{7, 1, 1, 1, 1}));
  EXPECT_EQ(f.tensor("none").numel(), 0);
  EXPECT_EQ(std::memcmp(f.tensor("a").data, a->data, 60), 0);
  EXPECT_EQ(std::memcmp(f.tensor("odd").data, b->data, 6), 0);
  EXPECT_EQ(std::memcmp(f.entry("c").data, c->data, 56), 0);
  expect_in("5 dimensions", error_of<DataError>([&] { f.tensor("c"); }));
  // Wide types first: the views are aligned although the odd-sized tensor was given first.
  for (const auto& [name, e] : f.entries()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(e.data) % static_cast<uintptr_t>(size_of(e.dtype)), 0u) << name;
  }
}

TEST(Safetensors, MissingTensorNamesTheNearest) {
  TempDir dir;
  test::Buffer a({1});
  a.zero();
  write_safetensors(dir.path("x.safetensors"), {{"model.norm.weight", a, {}}, {"lm_head.weight", a, {}}});
  SafetensorsFile f(dir.path("x.safetensors"));
  expect_in("Did you mean \"model.norm.weight\"?", error_of<DataError>([&] { f.entry("model.norms.weight"); }));
  const std::string far = error_of<DataError>([&] { f.entry("q"); });
  EXPECT_EQ(far.find("Did you mean"), std::string::npos) << far;
  expect_in("2 names", far);
}

TEST(Safetensors, MisalignedTensorsAreReadThroughACopy) {
  TempDir dir;
  const float x = 1.5f;
  std::string file = raw(
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})",
      1);
  file += std::string(reinterpret_cast<const char*>(&x), 4);
  spill(dir.path("x.safetensors"), file);
  SafetensorsFile f(dir.path("x.safetensors"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(f.tensor("x").data) % 4, 0u);
  EXPECT_EQ(f.tensor("x").f32()[0], 1.5f);
  EXPECT_EQ(f.tensor("x").numel(), 1);
  SafetensorsFile moved = std::move(f);
  EXPECT_EQ(moved.tensor("x").f32()[0], 1.5f);
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  TempDir dir;
  expect_in("No such file", error_of<DataError>([&] { SafetensorsFile f(dir.path("none")); }));
  expect_in("not a regular file", error_of<DataError>([&] { SafetensorsFile f(dir.path()); }));
  ASSERT_EQ(mkfifo(dir.path("pipe").c_str(), 0600), 0);
  expect_in("not a regular file", error_of<DataError>([&] { SafetensorsFile f(dir.path("pipe")); }));
  spill(dir.path("empty"), "");
  expect_in("0 bytes", error_of<DataError>([&] { SafetensorsFile f(dir.path("empty")); }));
  spill(dir.path("seven"), "1234567");
  expect_in("7 bytes", error_of<DataError>([&] { SafetensorsFile f(dir.path("seven")); }));
}

TEST(Safetensors, RefusesLyingLengths) {
  TempDir dir;
  for (uint64_t n : {uint64_t{3}, uint64_t{99'999'999}, uint64_t{100'000'001}, uint64_t{1} << 63, ~uint64_t{0}}) {
    spill(dir.path("x"), std::string(reinterpret_cast<const char*>(&n), 8) + "{}");
    expect_in("header has " + std::to_string(n), error_of<DataError>([&] { SafetensorsFile f(dir.path("x")); }));
  }
  expect_in("not a JSON object", refusal("", 0));
}

TEST(Safetensors, RefusesDamagedHeaders) {
  const std::string ok = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  expect_in("not JSON", refusal("{" + ok, 8));
  expect_in("not JSON", refusal("{\"\xff\":1}", 8));
  expect_in("not a JSON object", refusal("[1,2]", 8));
  expect_in("not a JSON object", refusal("\xef\xbb\xbf{}", 0));
  expect_in("key \"a\" twice", refusal("{" + ok + "," + ok + "}", 8));
  expect_in("key \"shape\" twice", refusal(R"({"a":{"dtype":"F32","shape":[9],"shape":[2],"data_offsets":[0,8]}})", 8));
  expect_in("__metadata__", refusal(R"({"__metadata__":3})", 0));
  expect_in("no dtype", refusal(R"({"a":5})", 8));
  expect_in("no dtype", refusal(R"({"a":{"dtype":"F32","shape":[2]}})", 8));
  expect_in("no dtype", refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8));
  expect_in("F8_E4M3", refusal(R"({"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}})", 8));
  for (const char* shape : {"[-2]", "[2.0]", "[\"2\"]", "[18446744073709551615]"}) {
    expect_in("whole number",
              refusal(std::string(R"({"a":{"dtype":"F32","data_offsets":[0,8],"shape":)") + shape + "}}", 8));
  }
  expect_in("overflows", refusal(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", 8));
  expect_in("overflows", refusal(R"({"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8]}})", 8));
}

TEST(Safetensors, RefusesOffsetsThatDoNotTile) {
  const auto entry = [](const char* name, int a, int b) {
    return text("\"", name, R"(":{"dtype":"U8","shape":[)", b - a, R"(],"data_offsets":[)", a, ",", b, "]}");
  };
  expect_in("hole at byte 3", refusal("{" + entry("a", 0, 3) + "," + entry("b", 4, 8) + "}", 8));
  expect_in("overlap at byte 3", refusal("{" + entry("a", 0, 4) + "," + entry("b", 3, 8) + "}", 8));
  expect_in("hole at byte 0", refusal("{" + entry("a", 1, 8) + "}", 8));
  expect_in("describes 8 bytes of data, the file holds 9", refusal("{" + entry("a", 0, 8) + "}", 9));
  expect_in("truncated", refusal("{" + entry("a", 0, 8) + "}", 7));
  expect_in("needs 8 bytes", refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4));
  expect_in("needs 8 bytes", refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8));
  expect_in("whole numbers", refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8));
  expect_in("whole numbers", refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8.5]}})", 8));
}

// Every prefix of a file is refused, and so is, or reads safely, every file with a byte changed.
TEST(Safetensors, SurvivesTruncationAndFlippedBytes) {
  TempDir dir(TempDir::Where::memory);
  test::Buffer a({3}), b({5}, DType::u8);
  a.normal(1);
  b.zero();
  write_safetensors(dir.path("good"), {{"a", a, {}}, {"b", b, {}}}, {{"m", "x"}});
  const std::string good = slurp(dir.path("good"));
  for (size_t n = 0; n < good.size(); ++n) {
    spill(dir.path("x"), good.substr(0, n));
    EXPECT_THROW(SafetensorsFile f(dir.path("x")), DataError) << n << " bytes";
  }
  std::mt19937 rng(7);
  for (size_t i = 0; i < good.size(); ++i) {
    std::string s = good;
    s[i] = static_cast<char>(rng());
    spill(dir.path("x"), s);
    try {
      SafetensorsFile f(dir.path("x"));
      for (const auto& [name, e] : f.entries()) {
        int64_t elements = 1;
        for (int64_t d : e.shape) elements *= d;
        EXPECT_EQ(e.bytes, elements * size_of(e.dtype));
        volatile char last = e.bytes ? static_cast<const char*>(e.data)[e.bytes - 1] : '\0';  // must be mapped
        (void)last;
      }
    } catch (const DataError&) {
      // refused: good
    }
  }
}

TEST(Safetensors, WriteErrorsNameThePathAndLeaveNothing) {
  TempDir dir;
  test::Buffer a({1024});
  a.normal(1);
  const std::vector<NamedTensor> tensors{{"a", a, {}}};
  const std::string full = error_of<DataError>([&] { write_safetensors("/dev/full", tensors); });
  expect_in("/dev/full", full);
  expect_in("No space left", full);
  EXPECT_TRUE(std::filesystem::exists("/dev/full"));

  expect_in("No such file", error_of<DataError>([&] { write_safetensors(dir.path("no/x"), tensors); }));
  spill(dir.path("file"), "");
  expect_in("Not a directory", error_of<DataError>([&] { write_safetensors(dir.path("file/x"), tensors); }));

  // The disk fills half way: the old file is as it was and no partial file is left.
  spill(dir.path("x"), "old");
  {
    test::FullDisk disk(1000);
    expect_in("too large", error_of<DataError>([&] { write_safetensors(dir.path("x"), tensors); }));
  }
  EXPECT_EQ(slurp(dir.path("x")), "old");
  size_t files = 0;
  for (const auto& e : std::filesystem::directory_iterator(dir.path())) files += e.exists();
  EXPECT_EQ(files, 2u) << "a temporary file was left";

  EXPECT_THROW(write_safetensors(dir.path("y"), {{"a", a, {}}, {"a", a, {}}}), ContractError);
  EXPECT_THROW(write_safetensors(dir.path("y"), {{"a", a, {7}}}), ContractError);
  expect_in("not UTF-8", error_of<DataError>([&] { write_safetensors(dir.path("y"), tensors, {{"k", "\xff"}}); }));
  EXPECT_FALSE(std::filesystem::exists(dir.path("y")));
}

}  // namespace
}  // namespace kestrel
