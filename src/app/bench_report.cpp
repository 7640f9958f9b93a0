#include "app/bench_report.hpp"

#include <iomanip>
#include <iostream>
#include <sstream>

#include "app/bench.hpp"
#include "core/error.hpp"
#include "storage/atomic_file.hpp"

namespace longhalo {

void BenchReport::add(const std::string& key, nlohmann::json value, const std::string& unit,
                      const std::string& meaning) {
  rows_.push_back({key, std::move(value), unit, meaning});
}

void BenchReport::publish(const MpiSession& session, const std::string& json_path) const {
  session.together([&] {
    if (!session.is_root()) return;
    std::ostringstream table;
    nlohmann::json json{{"benchmark", title_}};
    table << title_ << '\n';
    for (const Row& row : rows_) {
      json[row.key] = row.value;
      std::ostringstream value;
      if (row.value.is_number_float())
        value << std::setprecision(4) << row.value.get<double>();
      else
        value << (row.value.is_string() ? row.value.get<std::string>() : row.value.dump());
      table << "  " << std::left << std::setw(28) << row.key << std::right << std::setw(14) << value.str()
            << ' ' << std::left << std::setw(10) << row.unit << row.meaning << '\n';
    }
    print_text(table.str());
    if (!json_path.empty()) write_file_atomically(json_path, json.dump(2) + "\n");
  });
}

void print_text(const std::string& text) {
  if (!(std::cout << text << std::flush))
    throw UserError("standard output cannot be written", "the output of this command",
                    "free space where it is directed to, or direct it elsewhere");
}

}  // namespace longhalo
