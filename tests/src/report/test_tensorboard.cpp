#include "src/report/tensorboard.h"

#include <gtest/gtest.h>

#include "kernels/core/error.h"
#include "tests/src/checkpoint/temp_dir.h"

namespace kestrel {
namespace {

using test::slurp;
using test::TempDir;

std::string hex_of(const std::string& bytes) {
  std::string out;
  for (unsigned char c : bytes) {
    out += "0123456789abcdef"[c >> 4];
    out += "0123456789abcdef"[c & 15];
  }
  return out;
}

TEST(TensorBoard, Crc32cKnownAnswers) {
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(crc32c("", 0), 0u);
  const std::string zeros(32, '\0');
  EXPECT_EQ(crc32c(zeros.data(), 32), 0x8A9136AAu);  // RFC 3720, B.4
}

// Bytes that TensorFlow's own writer produced for the same two events.
TEST(TensorBoard, GoldenBytes) {
  const std::string two =
      tensorboard_version_record(1.7e9) + tensorboard_scalar_record(1.7e9 + 1, 10, {{"train/loss", 3.25}});
  EXPECT_EQ(hex_of(two),
            "1800000000000000a37f4b220900000040fc54d9411a0d627261696e2e4576656e743a32eced8f9d"
            "200000000000000029eda9500900004040fc54d941100a2a130a110a0a747261696e2f6c6f73731500005040551066b4");
}

TEST(TensorBoard, AFilePerStartAndTheRestartMark) {
  TempDir dir;
  const std::string logs = dir.path("run/tb");
  TensorBoardWriter first(logs, 0);
  first.write(1, {{"a", 1.}, {"b", -2.}});
  TensorBoardWriter second(logs, 300);
  EXPECT_NE(first.path(), second.path());
  EXPECT_NE(first.path().find("events.out.tfevents."), std::string::npos);
  // Version records (one double of time apart) have 40 bytes each; the restart record says step 301.
  const std::string a = slurp(first.path()), b = slurp(second.path());
  EXPECT_EQ(a.size(), 40u + 12 + 4 + 9 + 2 + 2 + 2 * (2 + 3 + 5));
  EXPECT_NE(b.find(std::string("\x10\xad\x02\x3a\x02\x08\x01", 7)), std::string::npos) << hex_of(b);
}

TEST(TensorBoard, ErrorsAreDataErrors) {
  TempDir dir;
  test::spill(dir.path("file"), "");
  EXPECT_THROW(TensorBoardWriter(dir.path("file"), 0), DataError);
}

}  // namespace
}  // namespace kestrel
