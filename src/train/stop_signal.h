// SIGTERM, SIGUSR1 and SIGINT ask a run to save and stop after the step in hand.  A second SIGINT kills as usual.
#pragma once

namespace kestrel {

// Installs the handlers for its lifetime and puts the old ones back.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  int received() const;  // the signal's number, 0: none
};

}  // namespace kestrel
