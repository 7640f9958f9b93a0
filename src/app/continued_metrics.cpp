#include "app/continued_metrics.hpp"

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/atomic_file.hpp"
#include "storage/posix.hpp"

namespace longhalo {

void take_back_metrics(const std::filesystem::path& file, int64_t step) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return;
  const InputFile input = open_input(file);
  std::string all(static_cast<size_t>(input.size_bytes), '\0');
  read_exactly(input.descriptor, 0, std::as_writable_bytes(std::span(all)), file);
  std::istringstream in(std::move(all));
  std::string kept, line;
  int64_t later = 0, damaged = 0;
  while (std::getline(in, line)) {
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto number = record.is_object() ? record.find("step") : record.end();
    const bool is_later =
        record.is_object() && number != record.end() && number->is_number_integer() && *number > step;
    if (record.is_object() && !is_later) {
      kept += line + "\n";
    } else {
      ++(is_later ? later : damaged);
    }
  }
  if (later + damaged == 0) return;
  write_file_atomically(file, kept);
  if (later > 0) log_info(text(file.string(), ": ", later, " records of later steps taken back"));
  if (damaged > 0) log_warning(text(file.string(), ": ", damaged, " damaged lines dropped"));
}

}  // namespace longhalo
