// Halo messages between every two ranks, one pair at a time: bandwidth and latency as a matrix, and which
// pair and host are slow. A pair exchanges as ranks do in a layer, both directions at once, over the
// transport that the job will use.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

/// One transport at work between this rank and a peer, which calls the same at the same time.
struct PairWay {
  std::string transport;
  /// Exchanges `bytes` with `peer`, `turns` times, and waits for the end.
  std::function<void(int peer, int64_t bytes, int64_t turns)> exchange;
  std::function<void()> poison;                        // the memory that receives
  std::function<bool(int peer, int64_t bytes)> right;  // has what the peer sends arrived?
};

/// Over MPI between buffers of `most` bytes in host memory. Throws UserError where there is no such memory.
PairWay host_pair_way(const MpiSession& session, int64_t most);

struct PairTime {
  int first = 0, second = 0;   // ranks
  double seconds = 0;          // of an exchange of `bytes`, each way; 0: not measured
  double latency_seconds = 0;  // of an exchange of 8 bytes
  bool right = true;           // what arrived is what was sent
};

/// All pairs of `ranks`, neighbours first, since halos travel between them; in large jobs the nearest alone.
/// Pure.
std::vector<PairTime> pairs_to_measure(int ranks);

/// Medians, of the slower rank of a pair; the same on every rank. `begins` is told what this rank does next,
/// so that a link that swallows messages can be named. Collective.
std::vector<PairTime> measure_pairs(const MpiSession& session, const PairWay& way, int64_t bytes,
                                    const std::function<void(const std::string& what)>& begins);

/// `least_gb_per_second` 0 is no floor; then a pair is judged by the median of those like it (on one host, or
/// between two). Pure.
std::vector<Finding> pair_findings(const std::vector<PairTime>& pairs, const std::vector<std::string>& hosts,
                                   const std::string& transport, int64_t bytes, double least_gb_per_second);

/// {"transport", "bytes", "gb_per_second": [[...]], "latency_seconds": [[...]]}; null on the diagonal and
/// where nothing was measured.
nlohmann::json json_of(const std::vector<PairTime>& pairs, int ranks, const std::string& transport,
                       int64_t bytes);

/// GB/s above the diagonal, microseconds below it; of the first 16 ranks.
std::string matrix_text(const std::vector<PairTime>& pairs, int ranks, int64_t bytes);

}  // namespace longhalo
