// The arrays of an inference job's documents, a file each in the folder "arrays" beside results.jsonl: their
// names, what is written into them, and whether what an earlier job left is still what its records say.
// results.hpp uses all this; nobody else should need more than DocumentArrays and as_read_back().
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

class Hdf5Writer;

/// Arrays of one document; an empty one is left out of the file.
struct DocumentArrays {
  std::span<const int32_t> tokens;  // [N]
  std::span<const float> scores;  // [N], log-probability of each token; the first is NaN (nothing before it)
  std::span<const float> embeddings;  // [chunks, embedding_size]
  int64_t embedding_size = 0;

  int64_t bytes() const;
};

/// As JSON text. Generated text and file names may hold bytes that are no UTF-8: U+FFFD in their place.
std::string json_text(const nlohmann::json& value);
/// Text as it reads back from a file of records, which is how they are told apart.
std::string as_read_back(std::string_view text);
/// A member of a record as text, as it reads back from the file; missing or null: empty.
std::string member_text(const nlohmann::json& record, const char* key);

/// File name of a document's arrays: its own name for people, and a hash of its whole path, which keeps equal
/// names of different folders apart and does not change when a resumed job lists its documents in another
/// order.
std::string arrays_name(std::string_view document);

/// Writes the arrays and what they belong to, and verifies them; `settings` may be null. Throws UserError.
void write_document_arrays(Hdf5Writer& writer, const std::string& document, const std::string* settings,
                           const DocumentArrays& arrays);

/// Makes the folder if it is missing. Throws UserError.
void make_arrays_folder(const std::filesystem::path& arrays);
/// The same, and that files can be moved into it from the folder beside it.
void require_arrays_folder(const std::filesystem::path& arrays);

/// Whether a file is there. Throws UserError where that cannot be found out, or what is there is no file:
/// nothing is put in its place.
bool require_file_or_nothing(const std::filesystem::path& file);

/// A record of an earlier job that names a file of arrays.
struct RecordWithArrays {
  std::string where;  // the record, for messages
  std::filesystem::path file;
  nlohmann::json record;
  bool is_whole;
};
/// With is_whole for "the file is there". Throws UserError where it is but cannot be read.
RecordWithArrays record_with_arrays(std::string where, const std::filesystem::path& file,
                                    nlohmann::json record);
/// Finds out of the files that are there which are whole, and of the document, text and model of their
/// records.
void look_into(std::vector<RecordWithArrays>& records, const std::filesystem::path& records_file);

}  // namespace longhalo
