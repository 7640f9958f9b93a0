// What is wrong with a list of documents or prompts as a whole, said before any work on them.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace longhalo {

/// Throws UserError where two entries are one in a file of records, by which records are told apart: of the
/// same bytes, or with other bytes that are no UTF-8. `what` is "document" or "prompt", `where` says where
/// two of their numbers, from 0, stand.
void refuse_repeats(std::span<const std::string> entries, std::string_view what,
                    const std::function<std::string(size_t, size_t)>& where);

}  // namespace longhalo
