#include "storage/result_arrays.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"
#include "storage/atomic_file.hpp"
#include "storage/checksum.hpp"
#include "storage/hdf5_writer.hpp"
#include "storage/posix.hpp"
#include "storage/trial_read.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr std::string_view kWhat = "the folder of the arrays";
constexpr std::string_view kRemedy =
    "move away what has this name, if it is no folder of this file system, or give this user the right to "
    "write into it (ls -ld shows the owner); another output folder takes all results, made anew";

int64_t length(const auto& values) {
  return static_cast<int64_t>(values.size());
}

// Whether the file is what the record says of it: one that was cut, emptied or damaged is none, nor is that
// of another document, or of another text or model. Throws Hdf5LockError: what could not be looked at need
// not be made again.
bool holds_arrays(const fs::path& file, const json& record) {
  const std::string task = member_text(record, "task");
  const auto number = [&](const char* key) {
    const auto found = record.find(key);
    return found != record.end() && found->is_number_integer() ? found->get<int64_t>() : -1;
  };
  try {
    const Hdf5File arrays = Hdf5File::open(file);
    const auto fits = [&](const char* key) {
      return arrays.string_attribute(key) == member_text(record, key);
    };
    // Earlier versions wrote no settings.
    if (!fits("document") || (arrays.has_attribute("settings") && !fits("settings"))) return false;
    arrays.dataset("tokens").expect(Hdf5Type::kInt32, std::array{number("document_tokens")});
    if (task == "score")
      arrays.dataset("scores").expect(Hdf5Type::kFloat32, std::array{number("document_tokens")});
    if (task == "embed")
      arrays.dataset("embeddings")
          .expect(Hdf5Type::kFloat32, std::array{number("chunks"), number("embedding_size")});
  } catch (const Hdf5LockError&) {
    throw;
  } catch (const UserError&) {
    return false;
  }
  return true;
}

bool survives(const fs::path& file, double most_seconds, const std::function<void()>& read) {
  try {
    try_to_read(file, most_seconds, read);
  } catch (const UserError&) {
    return false;
  }
  return true;
}

}  // namespace

int64_t DocumentArrays::bytes() const {
  return 4 * (length(tokens) + length(scores) + length(embeddings));
}

std::string json_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string as_read_back(std::string_view text) {
  return json::parse(json_text(text)).get<std::string>();
}

std::string member_text(const json& record, const char* key) {
  const auto member = record.find(key);
  if (member == record.end() || member->is_null()) return {};
  if (!member->is_string()) return json_text(*member);
  return as_read_back(member->get_ref<const std::string&>());
}

std::string arrays_name(std::string_view document) {
  constexpr size_t kLongest = 80;
  Checksum64 hash;
  hash.update(std::as_bytes(std::span(document.data(), document.size())));
  std::string name = fs::path(document).filename().string().substr(0, kLongest);
  for (char& letter : name) {
    const bool plain = (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
                       (letter >= 'A' && letter <= 'Z') || letter == '-' || letter == '.';
    if (!plain) letter = '_';
  }
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash.value()));
  return text(name, "-", digits, ".h5");
}

void write_document_arrays(Hdf5Writer& writer, const std::string& document, const std::string* settings,
                           const DocumentArrays& arrays) {
  writer.file().set_attribute("document", document);
  if (settings != nullptr) writer.file().set_attribute("settings", *settings);
  if (!arrays.tokens.empty()) writer.write("tokens", {length(arrays.tokens)}, arrays.tokens);
  if (!arrays.scores.empty()) writer.write("scores", {length(arrays.scores)}, arrays.scores);
  if (!arrays.embeddings.empty()) {
    check(arrays.embedding_size > 0 && length(arrays.embeddings) % arrays.embedding_size == 0,
          "embeddings are whole rows of embedding_size");
    writer.write("embeddings", {length(arrays.embeddings) / arrays.embedding_size, arrays.embedding_size},
                 arrays.embeddings);
  }
  writer.verify();
}

void make_arrays_folder(const fs::path& arrays) {
  make_directory(arrays, kWhat, kRemedy);
}

void require_arrays_folder(const fs::path& arrays) {
  constexpr int64_t kBytes = 4096;
  make_arrays_folder(arrays);
  // As arrays come there: made beside the folder and moved into it.
  const fs::path directory = arrays.parent_path();
  TemporaryFile probe(directory / "probe");
  const FileDescriptor descriptor(
      ::open(probe.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor.is_open()) throw_write_error(errno, directory, kBytes);
  const fs::path there = arrays / probe.path().filename();
  if (::rename(probe.path().c_str(), there.c_str()) != 0)
    throw UserError(text(kWhat, " takes no file: ", std::strerror(errno)), arrays.string(), kRemedy);
  ::unlink(there.c_str());
}

bool require_file_or_nothing(const fs::path& file) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (status.type() == fs::file_type::none) throw_file_error(error.value(), "inspect", file);
  if (status.type() == fs::file_type::not_found) return false;
  if (!fs::is_regular_file(status))
    throw UserError("a folder, device or pipe stands where the arrays of a document go", file.string(),
                    "move it away, or replace the old results");
  return true;
}

RecordWithArrays record_with_arrays(std::string where, const fs::path& file, json record) {
  const bool is_there = require_file_or_nothing(file);
  if (is_there) open_input(file);
  return {std::move(where), file, std::move(record), is_there};
}

// A damaged file may make the library crash, so a child process reads first: one for all of them, as there
// may be many thousands, and only where that one crashes one for each.
void look_into(std::vector<RecordWithArrays>& records, const fs::path& records_file) {
  constexpr double kMostSeconds = 10, kMostSecondsEach = 0.1;  // of the processor
  if (records.empty()) return;
  const auto read = [](const RecordWithArrays& one) {
    return one.is_whole && holds_arrays(one.file, one.record);
  };
  const auto read_all = [&] {
    for (const RecordWithArrays& one : records)
      read(one);
  };
  const bool none_crashes =
      survives(records_file, kMostSeconds + kMostSecondsEach * static_cast<double>(records.size()), read_all);
  for (RecordWithArrays& one : records)
    one.is_whole = (none_crashes || survives(one.file, kMostSeconds, [&] { read(one); })) && read(one);
}

}  // namespace longhalo
