// A benchmark's result as tables for people and as JSON for programs: rows of (key, value, unit, meaning),
// and lists of results of one kind (by shape, by message size) as tables below them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"

namespace longhalo {

/// Results of one kind. In JSON a list of objects with the columns' keys.
class BenchTable {
 public:
  struct Column {
    std::string key, unit;
  };
  explicit BenchTable(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// A value a column; null prints as "-".
  void add(std::vector<nlohmann::json> values);
  bool empty() const { return rows_.empty(); }
  nlohmann::json json() const;
  std::string printed() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<nlohmann::json>> rows_;
};

class BenchReport {
 public:
  explicit BenchReport(std::string title) : title_(std::move(title)) {}
  void add(const std::string& key, nlohmann::json value, const std::string& unit = "",
           const std::string& meaning = "");
  void add_table(const std::string& key, const BenchTable& table, const std::string& meaning = "");
  /// Rank 0 prints the tables to standard output and writes `json_path` unless that is empty. Collective.
  void publish(const MpiSession& session, const std::string& json_path) const;

 private:
  struct Row {
    std::string key;
    nlohmann::json value;
    std::string unit, meaning;
    std::string table;  // printed below the row
  };
  std::string title_;
  std::vector<Row> rows_;
};

}  // namespace longhalo
