// What a launcher, a scheduler or a user asks of a running job by signals, or by a time limit that is near.
// The handler sets a flag and nothing else; the ranks agree on it at the next step or document, since a
// signal may reach one of them only.
//   SIGTERM, SIGUSR2   save the state and stop (exit code 75)
//   SIGUSR1            save the state and go on (infer records every document as it is done, and just goes
//   on)
#pragma once

#include <optional>

#include "core/log.hpp"

namespace longhalo {

class JobSignals {
 public:
  /// From here on the three signals wait, in this thread and in those that it begins, until there is an
  /// object, which then hears them: one that comes while MPI starts is a request like any other. To be called
  /// first of all.
  static void hold_back();
  /// The end of that for a command that hears no requests: what has waited ends the process now.
  static void let_through();

  /// From here on the three signals no longer end the process, and the job's time limit is looked at. That
  /// stays so when the object is gone: a launcher sends SIGTERM to all ranks as soon as the first one has
  /// left with an exit code that is not 0, and each of them is to leave with its own. One object at a time.
  /// `say` warns of a time limit that cannot be read.
  explicit JobSignals(Say say = Say::kNo);
  JobSignals(const JobSignals&) = delete;
  JobSignals& operator=(const JobSignals&) = delete;

  /// Seconds that are left to the job when it stops because its time is over (app/job_end.hpp says what empty
  /// means). To be said before there is an object.
  static void reserve_before_end(std::optional<double> seconds);

  /// It took so long to save the state, which counts where no reserve was said.
  static void saving_takes(double seconds);

  /// Whether this rank was asked to stop, for good, by a signal or by the end of the job's time. Not to be
  /// called from several threads.
  static bool asked_to_stop();
  /// Whether a signal asked for that, be it one that still waits. Any thread may ask.
  static bool has_stop_signal();
  /// Whether this rank was asked to save its state since the last call.
  static bool take_asked_to_save();
};

}  // namespace longhalo
