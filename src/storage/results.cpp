#include "storage/results.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/json_depth.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/atomic_file.hpp"
#include "storage/hdf5_writer.hpp"

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

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
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
    // Not the fault that ends the job, which is told as the error.
    log_warning(text("the last records could not be written, and a job that is resumed makes them again: ",
                     error.what()));
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
      with_arrays.push_back(record_with_arrays(where, directory_ / arrays, std::move(record)));
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
    (one.is_whole ? recorded_ : lost_).insert(ResultKey::of(one.record));
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
  const std::string written_name = as_read_back(document);
  const auto settings = settings_.find(written_name);
  // Written in full beside the old results before those are moved.
  Hdf5Writer writer(directory_ / name, arrays.bytes());
  write_document_arrays(writer, written_name, settings == settings_.end() ? nullptr : &settings->second,
                        arrays);
  move_old_results_aside();
  make_arrays_folder(directory_ / "arrays");
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
