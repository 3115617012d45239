#include "src/train/stop_signal.h"

#include <csignal>

namespace kestrel {
namespace {

volatile std::sig_atomic_t received_signal = 0;
constexpr int kSignals[] = {SIGTERM, SIGUSR1, SIGINT};
struct sigaction previous[3];

void note(int signal) {
  received_signal = signal;
  if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous[i]);
}

StopSignal::~StopSignal() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

int StopSignal::received() const {
  return received_signal;
}

}  // namespace kestrel
