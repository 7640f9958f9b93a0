// Text input: documents (one file each) and prompts (one file, one prompt a line).
// Bytes are taken as they are; invalid UTF-8 is the tokenizer's business. A NUL byte means that the file is
// no text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace longhalo {

struct Document {
  std::string name;  // the path as the user gave it
  std::string text;
};

/// Reads a whole text file. Throws UserError if it is missing, unreadable, a folder, empty, larger than
/// `max_bytes`, or holds a NUL byte (with its offset and line).
inline constexpr int64_t kMaxDocumentBytes = int64_t{64} << 30;
Document read_document(const std::filesystem::path& file, int64_t max_bytes = kMaxDocumentBytes);

struct Prompts {
  std::vector<std::string> texts;
  std::vector<int64_t> lines;  // where each stands, from 1
};

/// Prompts of a file: one a line; LF or CRLF line ends; a byte order mark and lines of white space are
/// skipped. Throws UserError for the faults of read_document() and if no prompt is left.
Prompts read_prompts(const std::filesystem::path& file);

}  // namespace longhalo
