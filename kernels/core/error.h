// Errors a user can cause.  Each carries the exit code of the program (README, "Exit codes").
//
// A message is one paragraph: the value seen, the limit or the value expected, and the way out.
// Our own mistakes are `KESTREL_ASSERT`s; they never stand in for a check of a user's input.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kestrel {

enum class ExitCode : int {
  done = 0,
  usage = 2,       // command line or config
  data = 3,        // data, tokenizer, checkpoint or output
  device = 4,      // device, memory or communication
  diverged = 5,    // three non-finite steps in a row
  preempted = 75,  // saved after a stop signal: start me again
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

struct ConfigError : Error {
  explicit ConfigError(const std::string& m) : Error(ExitCode::usage, m) {}
};
struct DataError : Error {
  explicit DataError(const std::string& m) : Error(ExitCode::data, m) {}
};
struct DeviceError : Error {
  explicit DeviceError(const std::string& m) : Error(ExitCode::device, m) {}
};
struct DivergedError : Error {
  explicit DivergedError(const std::string& m) : Error(ExitCode::diverged, m) {}
};

// A shape, dtype or device that an operation does not take: a caller inside the program is wrong.
struct ContractError : std::logic_error {
  using std::logic_error::logic_error;
};

// text("rows ", n, " of ", m) -> "rows 3 of 4"
template <class... Args>
std::string text(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

[[noreturn]] void contract_failure(const char* expression, const char* file, int line, const std::string& message);

}  // namespace kestrel

// An operation's check of its arguments: KESTREL_CHECK(a.cols() == b.cols(), "a has ", a.cols(), " columns, b ",
// b.cols());
#define KESTREL_CHECK(condition, ...)                                                                            \
  do {                                                                                                           \
    if (!(condition)) ::kestrel::contract_failure(#condition, __FILE__, __LINE__, ::kestrel::text(__VA_ARGS__)); \
  } while (0)
