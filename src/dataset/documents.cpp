#include "dataset/documents.hpp"

#include <algorithm>
#include <new>
#include <span>
#include <string_view>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

void refuse_nul(const std::string& text_of_file, const std::filesystem::path& file) {
  const size_t at = text_of_file.find('\0');
  if (at == std::string::npos) return;
  const auto line =
      1 + std::count(text_of_file.begin(), text_of_file.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  throw UserError(text("the document holds a NUL byte at offset ", at, ", so it is not plain text"),
                  text(file.string(), ":", line),
                  "convert it to plain text (UTF-16 to UTF-8: iconv -f UTF-16 -t UTF-8), or remove the byte");
}

}  // namespace

Document read_document(const std::filesystem::path& file, int64_t max_bytes) {
  const InputFile input = open_input(file);
  if (input.size_bytes == 0) {
    throw UserError("the document is empty", file.string(), "remove it from the list, or fill it");
  }
  if (input.size_bytes > max_bytes) {
    throw UserError(
        text("the document has ", input.size_bytes, " bytes; ", max_bytes, " are the most allowed"),
        file.string(), "cut it into several documents");
  }
  Document document{file.string(), {}};
  try {
    document.text.resize(static_cast<size_t>(input.size_bytes));
  } catch (const std::bad_alloc&) {
    throw UserError(text("there is no memory for the document's ", input.size_bytes, " bytes"), file.string(),
                    "use a machine with more memory, or cut the document into several");
  }
  read_exactly(input.descriptor, 0, std::as_writable_bytes(std::span(document.text)), file);
  refuse_nul(document.text, file);
  return document;
}

Prompts read_prompts(const std::filesystem::path& file) {
  const Document document = read_document(file);
  std::string_view rest = document.text;
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (rest.substr(0, kByteOrderMark.size()) == kByteOrderMark) rest.remove_prefix(kByteOrderMark.size());
  Prompts prompts;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.find_first_not_of(" \t\r\v\f") == std::string_view::npos) continue;
    prompts.texts.emplace_back(line);
    prompts.lines.push_back(number);
  }
  if (prompts.texts.empty()) {
    throw UserError("there is no prompt in the file", file.string(), "write one prompt a line");
  }
  return prompts;
}

}  // namespace longhalo
