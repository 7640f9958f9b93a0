// Numbers that every rank tells of itself, together on rank 0: one message a rank, however many they are.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"

namespace longhalo {

class RankFigures {
 public:
  /// `own`: {group: {name: number}}, the same names on every rank, and whatever else is to be brought along.
  /// Collective.
  RankFigures(const MpiSession& session, const std::vector<std::string>& hosts, const nlohmann::json& own);

  /// What each rank told, in rank order; empty on ranks other than 0, where the functions below must not be
  /// called.
  const std::vector<nlohmann::json>& all() const { return all_; }

  std::vector<double> values(const std::string& group, const std::string& name) const;
  double sum(const std::string& group, const std::string& name) const;
  /// {"min", "mean", "max"}, and where ranks differ "rank" and "host" of the largest.
  nlohmann::json spread(const std::string& group, const std::string& name) const;
  /// Of all names of a group.
  nlohmann::json spreads(const std::string& group) const;

 private:
  std::vector<std::string> hosts_;
  std::vector<nlohmann::json> all_;
};

}  // namespace longhalo
