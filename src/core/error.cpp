#include "core/error.hpp"

#include <new>

#include "core/stop_request.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr std::string_view kWhere = "\n  where:  ", kRemedy = "\n  remedy: ";

}  // namespace

UserError::UserError(std::string_view what, std::string_view where, std::string_view remedy)
    : std::runtime_error(text(what, kWhere, where, kRemedy, remedy)) {}

std::string_view UserError::fault() const {
  const std::string_view all = what();
  return all.substr(0, all.find(kWhere));
}

std::string_view UserError::where() const {
  const std::string_view rest = std::string_view(what()).substr(fault().size() + kWhere.size());
  return rest.substr(0, rest.find(kRemedy));
}

InvariantError::InvariantError(std::string_view sentence, const std::source_location& where)
    : std::runtime_error(
          text("internal error: ", sentence, "\n  where:  ", where.file_name(), ":", where.line(), " in ",
               where.function_name(),
               "\n  remedy: this is a fault of LongHalo itself; please report it with this text")) {}

Ending ending_of(const std::exception& error) {
  if (dynamic_cast<const UserError*>(&error) != nullptr) return {ExitCode::kUserError, error.what()};
  if (dynamic_cast<const StopRequest*>(&error) != nullptr) return {ExitCode::kRequeue, error.what()};
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
      dynamic_cast<const std::length_error*>(&error) != nullptr)
    return {ExitCode::kUserError,
            UserError("out of host memory", "this process",
                      "use more ranks or nodes, a shorter document, or a machine with more memory")
                .what()};
  return {ExitCode::kInternalError, error.what()};
}

}  // namespace longhalo
