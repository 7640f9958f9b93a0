// Whether a host has a core for each thread of its ranks. Where it has not, ranks take turns: a layer waits
// for the one whose turn is last, and waits that should be microseconds become time slices. Launchers do it
// without a word: Slurm with another --cpus-per-task than OMP_NUM_THREADS says, mpirun with --oversubscribe,
// or two mpiruns in one allocation that bind their ranks to the same cores.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

struct RankCores {
  static constexpr int kMostCores = 8192;
  /// A bit for each core that the rank may run on; none: the system does not say.
  std::array<uint64_t, kMostCores / 64> allowed{};
  int64_t threads = 1;
  /// The beginning of a setting that should say how many, and is no number; or empty.
  std::array<char, 40> unusable{};
};

/// Of the ranks of one host, one or more. Pure.
Finding cores_finding(const std::vector<RankCores>& ranks);

/// cores_finding() of the ranks of this one's host; this one has `threads`, perhaps because of a setting that
/// is `unusable`; `hosts` by rank. Collective.
Finding cores_of_host(const MpiSession& session, const std::vector<std::string>& hosts, int threads,
                      const std::string& unusable);

}  // namespace longhalo
