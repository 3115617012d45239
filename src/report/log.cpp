#include "src/report/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

#include <vector>

namespace kestrel {

struct Log::Sinks {
  std::unique_ptr<spdlog::logger> logger;
  std::string failure;
};

Log::Log(const LogOptions& options) : sinks_(std::make_unique<Sinks>()) {
  std::vector<spdlog::sink_ptr> sinks;
  if (options.console) {
    sinks.push_back(std::make_shared<spdlog::sinks::stdout_sink_mt>());
    // On a terminal the line first wipes a progress line that may stand there; progress draws itself anew.
    sinks.back()->set_pattern(isatty(STDOUT_FILENO) ? "\r\x1b[K%v" : "%v");
  }
  if (!options.path.empty()) {
    try {
      sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.path));
    } catch (const spdlog::spdlog_ex& e) {
      throw DataError(text("cannot open the log ", options.path, ": ", e.what(),
                           ". Check that log.dir may be written, or choose another."));
    }
    sinks.back()->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
  }
  sinks_->logger = std::make_unique<spdlog::logger>("kestrel", sinks.begin(), sinks.end());
  // spdlog would catch what is thrown in here, print it and go on.
  sinks_->logger->set_error_handler([sinks = sinks_.get()](const std::string& why) { sinks->failure = why; });
  sinks_->logger->set_level(spdlog::level::info);
  sinks_->logger->flush_on(spdlog::level::info);
}

Log::~Log() = default;
Log::Log(Log&&) noexcept = default;
Log& Log::operator=(Log&&) noexcept = default;

void Log::put(Level level, const std::string& line) {
  const std::string prefix = level == Level::info ? "" : (level == Level::warn ? "warning: " : "error: ");
  const auto to = level == Level::info   ? spdlog::level::info
                  : level == Level::warn ? spdlog::level::warn
                                         : spdlog::level::err;
  // As an argument, never as a format: the line may hold braces.
  sinks_->logger->log(to, "{}", prefix + line);
  if (!sinks_->failure.empty())
    throw DataError(text("cannot write the log: ", sinks_->failure, ". Free space, or set log.dir elsewhere."));
}

}  // namespace kestrel
