#include "bench/bench_report.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "bench/bench.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/report_file.hpp"

namespace longhalo {
namespace {

std::string shown(const nlohmann::json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return value.dump();
  std::ostringstream out;
  out << std::setprecision(4) << value.get<double>();
  return out.str();
}

}  // namespace

void BenchTable::add(std::vector<nlohmann::json> values) {
  check(values.size() == columns_.size(), "a benchmark's table gets a value a column");
  rows_.push_back(std::move(values));
}

nlohmann::json BenchTable::json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& row : rows_) {
    nlohmann::json object = nlohmann::json::object();
    for (size_t c = 0; c < columns_.size(); ++c)
      object[columns_[c].key] = row[c];
    list.push_back(std::move(object));
  }
  return list;
}

std::string BenchTable::printed() const {
  std::vector<std::vector<std::string>> lines(2);
  for (const Column& column : columns_) {
    lines[0].push_back(column.key);
    lines[1].push_back(column.unit);
  }
  for (const auto& row : rows_) {
    lines.emplace_back();
    for (const nlohmann::json& value : row)
      lines.back().push_back(shown(value));
  }
  std::vector<size_t> widths(columns_.size(), 0);
  for (const auto& line : lines)
    for (size_t c = 0; c < line.size(); ++c)
      widths[c] = std::max(widths[c], line[c].size());
  std::string out;
  for (const auto& line : lines) {
    out += "   ";
    for (size_t c = 0; c < line.size(); ++c)
      out += text(' ', std::string(widths[c] - line[c].size(), ' '), line[c]);
    out += '\n';
  }
  return out;
}

void BenchReport::add(const std::string& key, nlohmann::json value, const std::string& unit,
                      const std::string& meaning) {
  rows_.push_back({key, std::move(value), unit, meaning, ""});
}

void BenchReport::add_table(const std::string& key, const BenchTable& table, const std::string& meaning) {
  rows_.push_back({key, table.json(), "", meaning, table.printed()});
}

void BenchReport::publish(const MpiSession& session, const std::string& json_path) const {
  session.together([&] {
    if (!session.is_root()) return;
    std::ostringstream table;
    nlohmann::json json{{"benchmark", title_}};
    table << title_ << '\n';
    for (const Row& row : rows_) {
      json[row.key] = row.value;
      const std::string value = row.table.empty() ? shown(row.value) : text(row.value.size(), " below");
      table << "  " << std::left << std::setw(28) << row.key << std::right << std::setw(14) << value << ' '
            << std::left << std::setw(10) << row.unit << row.meaning << '\n'
            << row.table;
    }
    publish_report(json_path, json.dump(2) + "\n", table.str());
  });
}

}  // namespace longhalo
