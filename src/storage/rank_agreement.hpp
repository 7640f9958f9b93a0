// What the checkpoint code needs of the ranks of a job, without knowing of MPI: MpiSession's together,
// gather_text and broadcast_text fit as they are. All three are collective.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace longhalo {

struct RankAgreement {
  int rank = 0;
  int ranks = 1;
  /// Runs the work on this rank; throws on all ranks if it threw on any.
  std::function<void(const std::function<void()>&)> together;
  /// The texts of all ranks in rank order, on rank 0; empty elsewhere.
  std::function<std::vector<std::string>(const std::string&)> gather;
  /// Rank 0's text on every rank.
  std::function<std::string(const std::string&)> broadcast;

  bool is_root() const { return rank == 0; }

  /// A job of one rank.
  static RankAgreement alone() {
    return {0, 1, [](const std::function<void()>& work) { work(); },
            [](const std::string& value) { return std::vector<std::string>{value}; },
            [](const std::string& value) { return value; }};
  }
};

}  // namespace longhalo
