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

/// Calls `look` with each file and tells all its UserErrors at once, as one in which `where` is the list, so
/// that they need not be met one after another; a single one is thrown as it is. After ten it looks no
/// further.
void look_at_each(std::span<const std::string> files, std::string_view where,
                  const std::function<void(const std::string&)>& look);

}  // namespace longhalo
