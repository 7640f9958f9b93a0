#include "app/continued_metrics.hpp"

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/atomic_file.hpp"
#include "storage/posix.hpp"

namespace longhalo {

void take_back_metrics(const std::filesystem::path& file, int64_t step) {
  if (!std::filesystem::exists(file)) return;
  std::ifstream in(file, std::ios::binary);
  if (!in) throw_file_error(errno, "read", file);
  std::string kept, line;
  int64_t dropped = 0;
  while (std::getline(in, line)) {
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto number = record.is_object() ? record.find("step") : record.end();
    const bool is_later =
        record.is_object() && number != record.end() && number->is_number_integer() && *number > step;
    if (record.is_object() && !is_later) {
      kept += line + "\n";
    } else {
      ++dropped;
    }
  }
  if (in.bad()) throw_file_error(EIO, "read", file);
  if (dropped == 0) return;
  write_file_atomically(file, kept);
  log_info(text(file.string(), ": ", dropped, " records of later steps taken back"));
}

}  // namespace longhalo
