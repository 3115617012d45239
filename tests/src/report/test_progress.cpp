#include "src/report/progress.h"

#include <gtest/gtest.h>

#include <fstream>

#include "src/report/log.h"
#include "tests/src/checkpoint/temp_dir.h"

namespace kestrel {
namespace {

using test::slurp;
using test::TempDir;

TEST(Progress, Texts) {
  EXPECT_EQ(duration_text(0), "0:00:00");
  EXPECT_EQ(duration_text(259.4), "0:04:19");
  EXPECT_EQ(duration_text(2 * 86400 + 3 * 3600), "2 d 3:00:00");
  EXPECT_EQ(duration_text(1. / 0.), "?");
  EXPECT_EQ(duration_text(-1), "?");
  EXPECT_EQ(count_text(0), "0");
  EXPECT_EQ(count_text(3.41), "3.41");
  EXPECT_EQ(count_text(999), "999");
  EXPECT_EQ(count_text(1000), "1k");
  EXPECT_EQ(count_text(99.97), "100");
  EXPECT_EQ(count_text(999'600), "1M");
  EXPECT_EQ(count_text(1'250'000), "1.25M");
  EXPECT_EQ(count_text(2.8e12), "2.8T");
  EXPECT_EQ(count_text(-1500), "-1.5k");
}

struct Clock {
  double now = 100;
};

// What fn(progress, clock) writes.
template <class F>
std::string written(bool terminal, int64_t total, int64_t done, F&& fn) {
  TempDir dir;
  std::FILE* out = std::fopen(dir.path("out").c_str(), "w");
  Clock clock;
  {
    Progress p("work", total, done,
               {.out = out, .terminal = terminal, .every_s = 10, .clock = [&] { return clock.now; }});
    fn(p, clock);
  }
  std::fclose(out);
  return slurp(dir.path("out"));
}

TEST(Progress, PlainLinesElsewhere) {
  const std::string s = written(false, 1000, 0, [](Progress& p, Clock& c) {
    p.update(1);
    c.now += 9;
    p.update(50);  // too soon after the start
    c.now += 1;
    p.update(100, "loss 3.2");
    c.now += 90;
    p.update(1000);
  });
  EXPECT_EQ(s,
            "work  10% [100/1k] 10/s, 0:01:30 left | loss 3.2\n"
            "work 100% [1k/1k] 10/s, 0:00:00 left\n"
            "work: 1k in 0:01:40\n");
}

TEST(Progress, OneLineOnATerminal) {
  const std::string s = written(true, 4, 0, [](Progress& p, Clock& c) {
    p.update(0, "a long note");
    c.now += 10;
    p.update(2);
    p.update(3);  // too soon
    p.finish("done");
    p.finish("again");
  });
  EXPECT_EQ(s,
            "\rwork   0% [0/4] | a long note"
            "\rwork  50% [2/4] 0.2/s, 0:00:10 left"
            "\rwork: 3 of 4 in 0:00:10 | done     \n");
  EXPECT_EQ(s.find('\n'), s.size() - 1);
}

TEST(Progress, ResumedWorkDoesNotCountForTheSpeed) {
  const std::string s = written(false, 1000, 500, [](Progress& p, Clock& c) {
    c.now += 10;
    p.update(510);
  });
  EXPECT_NE(s.find("[510/1k] 1/s, 0:08:10 left"), std::string::npos) << s;
}

TEST(Progress, UnknownTotal) {
  const std::string s = written(false, 0, 0, [](Progress& p, Clock& c) {
    c.now += 10;
    p.update(20);
  });
  EXPECT_EQ(s, "work [20] 2/s\nwork: 20 in 0:00:10\n");
}

TEST(Log, FileHasTimesAndLevelsConsoleIsPlain) {
  TempDir dir;
  testing::internal::CaptureStdout();
  {
    Log log({.console = true, .path = dir.path("log.txt")});
    log.info("step ", 3, " {braces} %s");
    log.warn("odd");
    Log moved = std::move(log);
    moved.error("bad");
    // Flushed line by line: readable while the program runs.
    EXPECT_NE(slurp(dir.path("log.txt")).find("error error: bad\n"), std::string::npos);
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "step 3 {braces} %s\nwarning: odd\nerror: bad\n");
  const std::string file = slurp(dir.path("log.txt"));
  EXPECT_NE(file.find(" info step 3 {braces} %s\n"), std::string::npos) << file;
  EXPECT_NE(file.find(" warning warning: odd\n"), std::string::npos) << file;
  testing::internal::CaptureStdout();
  {
    Log silent({.console = false, .path = dir.path("log.txt")});
    silent.info("appended");
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(slurp(dir.path("log.txt")).find(file), 0u) << "the file was not appended to";
  EXPECT_THROW(Log({.console = false, .path = dir.path()}), DataError);
}

}  // namespace
}  // namespace kestrel
