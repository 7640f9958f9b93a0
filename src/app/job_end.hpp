// When a scheduler ends this job, and whether that is near: then a job saves its state and leaves by itself,
// because what a scheduler sends at the limit leaves some seconds, if it comes at all. Slurm says the end in
// SLURM_JOB_END_TIME, seconds since 1970 (scripts/slurm/job.sh sets it where Slurm, before 23.02, does not).
#pragma once

#include <optional>

#include "core/log.hpp"

namespace longhalo {

class JobEnd {
 public:
  /// Times are seconds since 1970. `reserve_seconds` is kept for the state to be saved; empty: two minutes,
  /// or a tenth of what the job has left at `now` where that is less. An end that is over at `now` is another
  /// job's, or none.
  JobEnd(std::optional<double> end, std::optional<double> reserve_seconds, double now);

  /// It took so long to save the state: a reserve that was not given is then at least twice that, because a
  /// save that is under way has to end before the last one begins.
  void saving_takes(double seconds);

  /// Asked at every point where the job can stop. True when the reserve would be used up before the next such
  /// point, taken to be as far away as the farthest two so far were from each other; from then on always.
  bool is_near(double now);

  /// Seconds until the end, of which there has to be one.
  double left(double now) const;

 private:
  std::optional<double> end_;
  bool reserve_is_given_ = false;
  double reserve_ = 0, longest_ = 0;
  std::optional<double> asked_;
  bool near_ = false;
};

/// What SLURM_JOB_END_TIME says; empty where it is not set or is no time, of which `say` warns: a job that
/// was to stop before its end would not.
std::optional<double> job_end_of_environment(Say say = Say::kNo);

/// Seconds since 1970, by the system's clock at the first call and a steady one from there: a clock that is
/// set while a job runs would make it stop far too early, or not at all.
double now_seconds();

}  // namespace longhalo
