#include "comm/alike.hpp"

#include "core/text.hpp"

namespace longhalo {

void require_alike(const MpiSession& session, std::string_view what, const std::string& value,
                   std::string_view where, std::string_view remedy) {
  const std::string first = broadcast_text(session, value);
  session.together([&] {
    if (value == first) return;
    throw UserError(text(what, " on this rank, ", value, ", is not that of rank 0, ", first), where, remedy);
  });
}

}  // namespace longhalo
