// A benchmark's result as a table for people and as JSON for programs: rows of (key, value, unit, meaning).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"

namespace longhalo {

class BenchReport {
 public:
  explicit BenchReport(std::string title) : title_(std::move(title)) {}
  void add(const std::string& key, nlohmann::json value, const std::string& unit = "",
           const std::string& meaning = "");
  /// Rank 0 prints the table to standard output and writes `json_path` unless that is empty. Collective.
  void publish(const MpiSession& session, const std::string& json_path) const;

 private:
  struct Row {
    std::string key;
    nlohmann::json value;
    std::string unit, meaning;
  };
  std::string title_;
  std::vector<Row> rows_;
};

}  // namespace longhalo
