#include "core/error.hpp"

#include "core/text.hpp"

namespace longhalo {

UserError::UserError(std::string_view what, std::string_view where, std::string_view remedy)
    : std::runtime_error(text(what, "\n  where:  ", where, "\n  remedy: ", remedy)) {}

InvariantError::InvariantError(std::string_view sentence, const std::source_location& where)
    : std::runtime_error(
          text("internal error: ", sentence, "\n  where:  ", where.file_name(), ":", where.line(), " in ",
               where.function_name(),
               "\n  remedy: this is a fault of LongHalo itself; please report it with this text")) {}

}  // namespace longhalo
