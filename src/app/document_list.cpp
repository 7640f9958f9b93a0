#include "app/document_list.hpp"

#include <exception>
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

void look_at_each(std::span<const std::string> files, std::string_view where,
                  const std::function<void(const std::string&)>& look) {
  constexpr int kMost = 10;
  std::exception_ptr first;
  std::string all;
  int faults = 0;
  for (size_t i = 0; i < files.size() && faults < kMost; ++i) {
    try {
      look(files[i]);
    } catch (const UserError& error) {
      if (faults++ == 0) first = std::current_exception();
      all += text("\n    ", error.where(), ": ", error.fault());
    }
  }
  if (faults == 1) std::rethrow_exception(first);
  if (faults > 0)
    throw UserError(text(faults == kMost ? "at least " : "", faults, " documents cannot be read:", all),
                    where, "correct each of them, or take it out of the list");
}

}  // namespace longhalo
