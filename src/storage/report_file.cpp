#include "storage/report_file.hpp"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "storage/atomic_file.hpp"

namespace longhalo {
namespace {

bool is_report(const std::filesystem::path& file) {
  constexpr int64_t kMostBytes = int64_t{256} << 20;  // a doctor's matrix of all pairs of ranks is large
  const nlohmann::json report = nlohmann::json::parse(read_json_text(file, kMostBytes), nullptr, false);
  const auto has_text = [&](const char* key) { return report.contains(key) && report[key].is_string(); };
  return report.is_object() && (has_text("benchmark") || has_text("doctor"));
}

}  // namespace

void require_report_place(const std::filesystem::path& file) {
  if (file.empty()) return;
  require_replaceable(end_of_trusted_links(file));
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored) || std::filesystem::is_empty(file, ignored) || is_report(file))
    return;
  throw UserError("this file is there already and is no report of longhalo bench or doctor", file.string(),
                  "name another file for the report (--json), or remove this one");
}

void publish_report(const std::filesystem::path& file, std::string_view report, std::string_view table) {
  std::exception_ptr fault;
  try {
    if (!file.empty()) write_file_atomically(end_of_trusted_links(file), report);
  } catch (const UserError&) {
    fault = std::current_exception();
  }
  print_text(table);
  if (fault) std::rethrow_exception(fault);
}

}  // namespace longhalo
