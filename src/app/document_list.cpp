#include "app/document_list.hpp"

#include <map>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/result_arrays.hpp"

namespace longhalo {

void refuse_repeats(std::span<const std::string> entries, std::string_view what,
                    const std::function<std::string(size_t, size_t)>& where) {
  std::map<std::string, size_t> numbers;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto [earlier, is_new] = numbers.emplace(as_read_back(entries[i]), i);
    if (is_new) continue;
    const std::string& other = entries[earlier->second];
    if (other == entries[i])
      throw UserError(text("the ", what, " \"", other, "\" is there twice"), where(earlier->second, i),
                      "remove one of the two");
    throw UserError(text("the ", what, "s \"", other, "\" and \"", entries[i],
                         "\" differ in bytes that are no UTF-8 alone; records, which have U+FFFD in their "
                         "place, could not tell them apart"),
                    where(earlier->second, i), "rename one of the two, or write it in UTF-8");
  }
}

}  // namespace longhalo
