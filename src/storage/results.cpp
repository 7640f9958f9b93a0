#include "storage/results.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/json_depth.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/atomic_file.hpp"
#include "storage/hdf5_writer.hpp"
#include "storage/trial_read.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

// At most a tenth of the time goes into rewriting results.jsonl.
constexpr double kRewriteEvery = 10;
constexpr size_t kCopyBlockBytes = size_t{1} << 20;
constexpr int64_t kProbeBytes = 4096;

constexpr std::string_view kWhat = "the output folder";
constexpr std::string_view kRemedy = "choose another output folder, or remove what is in the way";
constexpr std::string_view kArraysWhat = "the folder of the arrays";
constexpr std::string_view kArraysRemedy =
    "move away what has this name, if it is no folder of this file system, or give this user the right to "
    "write into it (ls -ld shows the owner); another output folder takes all results, made anew";

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Generated text and file names may hold bytes that are no UTF-8; JSON gets U+FFFD in their place.
std::string json_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string member_text(const json& record, const char* key) {
  const auto member = record.find(key);
  if (member == record.end() || member->is_null()) return {};
  if (!member->is_string()) return json_text(*member);
  // Through JSON and back, so that a key made before writing equals the one read from the file.
  return json::parse(json_text(*member)).get<std::string>();
}

// File name of a document's arrays: its own name for people, and a hash of its whole path, which keeps equal
// names of different folders apart and does not change when a resumed job lists its documents in another
// order.
std::string arrays_name(std::string_view document) {
  constexpr size_t kLongest = 80;
  Checksum64 hash;
  hash.update(bytes_of(document));
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

uint64_t checksum_of(const FileDescriptor& descriptor, int64_t bytes, const fs::path& file) {
  std::vector<std::byte> block(std::min(kCopyBlockBytes, static_cast<size_t>(bytes)));
  Checksum64 checksum;
  for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(block.size())) {
    const auto part = std::span(block).first(std::min(block.size(), static_cast<size_t>(bytes - at)));
    read_exactly(descriptor, at, part, file);
    checksum.update(part);
  }
  return checksum.value();
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

std::string file_contents(const fs::path& file) {
  const InputFile input = open_input(file);
  std::string contents(static_cast<size_t>(input.size_bytes), '\0');
  read_exactly(input.descriptor, 0, std::as_writable_bytes(std::span(contents)), file);
  return contents;
}

// Whether the file is what the record says of it: one that was cut, emptied or damaged is none, nor is that
// of another document, or of another text or model. Throws Hdf5LockError: what could not be looked at need
// not be made again.
bool holds_arrays(const fs::path& file, const json& record) {
  const std::string task = member_text(record, "task");
  const auto length = [&](const char* key) {
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
    arrays.dataset("tokens").expect(Hdf5Type::kInt32, std::array{length("document_tokens")});
    if (task == "score")
      arrays.dataset("scores").expect(Hdf5Type::kFloat32, std::array{length("document_tokens")});
    if (task == "embed")
      arrays.dataset("embeddings")
          .expect(Hdf5Type::kFloat32, std::array{length("chunks"), length("embedding_size")});
  } catch (const Hdf5LockError&) {
    throw;
  } catch (const UserError&) {
    return false;
  }
  return true;
}

// A record of an earlier job that names a file of arrays.
struct RecordWithArrays {
  ResultKey key;
  std::string where;
  fs::path file;
  json record;
  bool is_whole;
};

// Whether a file is there. What cannot be looked at need not be gone, and nothing is put in place of what is
// no file.
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

bool is_there(const fs::path& file) {
  if (!require_file_or_nothing(file)) return false;
  open_input(file);
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

// Finds out which files are whole. A damaged one may make the library crash, so a child process reads first:
// one for all of them, as there may be many thousands, and only where that one crashes one for each.
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

void rename_if_there(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) throw_file_error(errno, "move", from);
}

}  // namespace

ResultKey ResultKey::of(const json& record) {
  return {member_text(record, "document"), member_text(record, "query"), member_text(record, "task")};
}

ResultWriter::ResultWriter(const fs::path& directory, IfResultsExist if_exist, Settings settings, Tasks tasks)
    : directory_(directory),
      settings_(std::move(settings)),
      tasks_(std::move(tasks)),
      records_file_(directory / "results.jsonl") {
  make_directory(directory_, kWhat, kRemedy);
  lock_.emplace(directory_);
  probe();
  std::error_code ignored;
  if (fs::exists(records_file_, ignored)) {
    if (!fs::is_regular_file(records_file_, ignored)) {  // replacing a folder would delete what is in it
      throw UserError("this is not a file of records", records_file_.string(),
                      "choose another output folder, or remove what is in the way");
    }
    if (if_exist == IfResultsExist::kError) {
      throw UserError("there are results already", records_file_.string(),
                      "choose another output folder, or set output.if_exists to resume, or to replace, which "
                      "gives up the old results");
    }
    if (if_exist == IfResultsExist::kResume) read_existing();
  }
  remove_previous_ = if_exist == IfResultsExist::kResume;  // of a replacing job that was killed
  move_aside_ = if_exist == IfResultsExist::kReplace;
  remove_abandoned_temporaries(directory_, Abandoned::kAll);
  remove_abandoned_temporaries(directory_ / "arrays", Abandoned::kAll);
}

ResultWriter::~ResultWriter() {
  try {
    if (!failed_) flush();
  } catch (const std::exception& error) {
    log_error(text("the last records could not be written: ", error.what()));
  }
}

void ResultWriter::probe() {
  const TemporaryFile probe(directory_ / "probe");
  const FileDescriptor descriptor(
      ::open(probe.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor.is_open()) throw_write_error(errno, directory_, kProbeBytes);
  const std::vector<std::byte> block(static_cast<size_t>(kProbeBytes), std::byte{1});
  write_all(descriptor, block, directory_, kProbeBytes);
  sync_file(descriptor, directory_);
}

void ResultWriter::require_places(const std::vector<std::string>& documents_with_arrays) const {
  require_replaceable(records_file_);
  if (move_aside_) return require_way_aside();
  const fs::path arrays = directory_ / "arrays";
  std::error_code ignored;
  if (documents_with_arrays.empty() || !fs::exists(fs::symlink_status(arrays, ignored)))
    return;  // it will be made
  require_arrays_folder(arrays);
  for (const std::string& document : documents_with_arrays) {
    const fs::path file = arrays / arrays_name(document);
    require_file_or_nothing(file);
    require_replaceable(file);
  }
}

// What move_old_results_aside() moves, and what it removes before.
void ResultWriter::require_way_aside() const {
  require_removable(directory_ / "arrays");
  for (const char* name : {"results.previous.jsonl", "arrays.previous"}) {
    require_removable(directory_ / name);
    std::error_code error;
    fs::recursive_directory_iterator entry(directory_ / name, error);
    for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error))
      require_removable(entry->path());
  }
}

void ResultWriter::require_arrays_folder(const fs::path& arrays) const {
  make_directory(arrays, kArraysWhat, kArraysRemedy);
  // As write_arrays() does it: made beside the folder and moved into it.
  TemporaryFile probe(directory_ / "probe");
  const FileDescriptor descriptor(
      ::open(probe.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor.is_open()) throw_write_error(errno, directory_, kProbeBytes);
  const fs::path there = arrays / probe.path().filename();
  if (::rename(probe.path().c_str(), there.c_str()) != 0)
    throw UserError(text(kArraysWhat, " takes no file: ", std::strerror(errno)), arrays.string(),
                    kArraysRemedy);
  ::unlink(there.c_str());
}

void ResultWriter::read_existing() {
  const std::string contents = file_contents(records_file_);
  std::vector<RecordWithArrays> with_arrays;
  int64_t line_number = 1;
  for (size_t begin = 0; begin < contents.size(); ++line_number) {
    const size_t end = contents.find('\n', begin);
    const std::string where = text(records_file_.string(), ":", line_number);
    const std::string_view remedy =
        "remove that line (another program damaged it), or replace the old results";
    if (end == std::string::npos) throw UserError("the last line has no end", where, remedy);
    if (json_depth(std::string_view(contents).substr(begin, end - begin)) > kMostJsonDepth)
      throw UserError("this line is nested too deeply", where, remedy);
    json record = json::parse(contents.begin() + static_cast<std::ptrdiff_t>(begin),
                              contents.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
    if (!record.is_object() || !record.contains("document") || !record.contains("task")) {
      throw UserError("this line is not a JSON record with 'document' and 'task'", where, remedy);
    }
    const ResultKey key = ResultKey::of(record);
    const auto settings = settings_.find(key.document);
    if (settings != settings_.end() && record.value("settings", json("")) != settings->second) {
      throw UserError(text("this record of \"", key.document,
                           "\" was made with other settings, another model, or another text"),
                      where, "resume with what that job had, or choose another output folder");
    }
    const bool is_of_this_job = settings != settings_.end() && tasks_.contains(key.task);
    const fs::path arrays = is_of_this_job ? member_text(record, "arrays") : "";
    if (arrays.empty())
      recorded_.insert(key);
    else
      with_arrays.push_back(
          {key, where, directory_ / arrays, std::move(record), is_there(directory_ / arrays)});
    begin = end + 1;
  }
  // The numbers of a record are of little use without the arrays that it names.
  look_into(with_arrays, records_file_);
  for (const RecordWithArrays& one : with_arrays) {
    if (!one.is_whole && lost_.empty())
      log_warning(
          text(one.where, ": the arrays of this record, ", member_text(one.record, "arrays"),
               ", are not there any more, or not whole, or of another document; what this job has to do "
               "of such records is done again"));
    (one.is_whole ? recorded_ : lost_).insert(one.key);
  }
  committed_bytes_ = static_cast<int64_t>(contents.size());
  committed_.update(bytes_of(contents));
}

void ResultWriter::move_old_results_aside() {
  if (!move_aside_) return;
  // A remnant of a job that was killed between here and finish() is older still.
  remove_quietly(directory_ / "results.previous.jsonl");
  remove_quietly(directory_ / "arrays.previous");
  rename_if_there(records_file_, directory_ / "results.previous.jsonl");
  rename_if_there(directory_ / "arrays", directory_ / "arrays.previous");
  sync_directory(directory_);
  move_aside_ = false;
  remove_previous_ = true;
}

std::string ResultWriter::write_arrays(std::string_view document, const DocumentArrays& arrays) {
  const std::string name = arrays_name(document);
  const auto length = [](const auto& values) { return static_cast<int64_t>(values.size()); };
  const int64_t bytes_needed =
      4 * (length(arrays.tokens) + length(arrays.scores) + length(arrays.embeddings));
  // Written in full beside the old results before those are moved.
  Hdf5Writer writer(directory_ / name, bytes_needed);
  const std::string written_name = member_text({{"document", document}}, "document");
  writer.file().set_attribute("document", written_name);
  if (const auto settings = settings_.find(written_name); settings != settings_.end())
    writer.file().set_attribute("settings", settings->second);
  if (!arrays.tokens.empty()) writer.write("tokens", {length(arrays.tokens)}, arrays.tokens);
  if (!arrays.scores.empty()) writer.write("scores", {length(arrays.scores)}, arrays.scores);
  if (!arrays.embeddings.empty()) {
    check(arrays.embedding_size > 0 && length(arrays.embeddings) % arrays.embedding_size == 0,
          "embeddings are whole rows of embedding_size");
    writer.write("embeddings", {length(arrays.embeddings) / arrays.embedding_size, arrays.embedding_size},
                 arrays.embeddings);
  }
  writer.verify();
  move_old_results_aside();
  make_directory(directory_ / "arrays", kArraysWhat, kArraysRemedy);
  writer.commit_to(directory_ / "arrays" / name);
  return "arrays/" + name;
}

void ResultWriter::write(const std::vector<json>& records) {
  for (const json& record : records) {
    check(record.is_object() && record.contains("document") && record.contains("task"),
          "a result record names its document and task");
    if (const auto lost = lost_.find(ResultKey::of(record)); lost != lost_.end())
      replaced_.insert(lost_.extract(lost));
    json complete = record;
    const auto settings = settings_.find(member_text(record, "document"));
    if (settings != settings_.end()) complete["settings"] = settings->second;
    waiting_ += json_text(complete) + "\n";
  }
  if (since_flush_.seconds() >= kRewriteEvery * flush_seconds_) flush();
}

void ResultWriter::copy_committed(const FileDescriptor& to, const fs::path& file, int64_t bytes_needed) {
  if (committed_bytes_ == 0) return;
  const InputFile from = open_input(records_file_);
  std::vector<std::byte> block(std::min(kCopyBlockBytes, static_cast<size_t>(committed_bytes_)));
  Checksum64 checksum;
  for (int64_t at = 0; at < committed_bytes_;) {
    const auto count = std::min<size_t>(block.size(), static_cast<size_t>(committed_bytes_ - at));
    const std::span<std::byte> part = std::span(block).first(count);
    read_exactly(from.descriptor, at, part, records_file_);
    checksum.update(part);
    write_all(to, part, file, bytes_needed);
    at += static_cast<int64_t>(count);
  }
  if (checksum.value() != committed_.value() || from.size_bytes != committed_bytes_) refuse_changes();
}

void ResultWriter::refuse_changes() const {
  throw UserError("the file was changed while the job ran", records_file_.string(),
                  "let no other program write it; the records are as that program left them");
}

// All records are to be written anew, without those that new ones replace.
void ResultWriter::drop_replaced() {
  if (replaced_.empty()) return;
  const std::string contents = file_contents(records_file_);
  Checksum64 checksum;
  checksum.update(bytes_of(contents));
  if (checksum.value() != committed_.value()) refuse_changes();
  std::string kept;
  for (size_t begin = 0; begin < contents.size();) {
    const size_t end = contents.find('\n', begin) + 1;
    const std::string_view line = std::string_view(contents).substr(begin, end - begin);
    if (!replaced_.contains(ResultKey::of(json::parse(line)))) kept += line;
    begin = end;
  }
  waiting_.insert(0, kept);
  replaced_.clear();
  committed_bytes_ = 0;
  committed_ = Checksum64();
}

void ResultWriter::flush() {
  if (waiting_.empty()) return;
  const Stopwatch watch;
  try {
    drop_replaced();
    const int64_t bytes_needed = committed_bytes_ + static_cast<int64_t>(waiting_.size());
    Checksum64 expected = committed_;
    expected.update(bytes_of(waiting_));
    require_space(records_file_, bytes_needed);
    TemporaryFile temporary(records_file_);
    {
      const FileDescriptor descriptor(
          ::open(temporary.path().c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!descriptor.is_open()) throw_write_error(errno, records_file_, bytes_needed);
      copy_committed(descriptor, records_file_, bytes_needed);
      write_all(descriptor, bytes_of(waiting_), records_file_, bytes_needed);
      sync_file(descriptor, records_file_);
      drop_cache(descriptor);
      if (checksum_of(descriptor, bytes_needed, records_file_) != expected.value()) {
        throw UserError("what was read back differs from what was written", records_file_.string(),
                        "the disk or file system is damaged; choose another place");
      }
    }
    move_old_results_aside();
    temporary.commit();
    committed_bytes_ = bytes_needed;
    committed_ = expected;
    waiting_.clear();
    failed_ = false;
  } catch (...) {
    failed_ = true;
    throw;
  }
  flush_seconds_ = watch.seconds();
  since_flush_.restart();
}

void ResultWriter::finish() {
  flush();
  if (remove_previous_) {
    remove_quietly(directory_ / "results.previous.jsonl");
    remove_quietly(directory_ / "arrays.previous");
  }
}

}  // namespace longhalo
