// What a launcher, a scheduler or a user asks of a running job by signals. The handler sets a flag and
// nothing else; the ranks agree on it at the next step or document, since a signal may reach one of them
// only.
//   SIGTERM, SIGUSR2   save the state and stop (exit code 75)
//   SIGUSR1            save the state and go on (infer records every document as it is done, and just goes
//   on)
#pragma once

namespace longhalo {

class JobSignals {
 public:
  /// From here on the three signals no longer end the process. One object at a time.
  JobSignals();
  /// Gives the signals back what they did before.
  ~JobSignals();
  JobSignals(const JobSignals&) = delete;
  JobSignals& operator=(const JobSignals&) = delete;

  /// Whether this rank was asked to stop, for good.
  static bool asked_to_stop();
  /// Whether this rank was asked to save its state since the last call.
  static bool take_asked_to_save();
};

}  // namespace longhalo
