// Files that others had a hand in: text of a model folder, which may be anything, and folders that everybody
// may write to, where a link in place of an output would send what is written elsewhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace longhalo {

/// Where a relative path begins, for the end of a message on a file that is not there: a launcher (srun
/// --chdir, mpirun -wdir) may have started this process in another folder than the user has in mind. Empty
/// for an absolute path.
std::string start_of_relative(const std::filesystem::path& path);

/// The bytes of a regular file of at most `most_bytes`. Throws UserError, also for a pipe or a device
/// (reading one may never end), a larger file, and one that is cut while it is read.
std::string read_text_file(const std::filesystem::path& file, int64_t most_bytes);

/// The same for JSON: also refuses a text that is nested deeper than kMostJsonDepth.
std::string read_json_text(const std::filesystem::path& file, int64_t most_bytes);

/// What a file, pipe or terminal gives until its end, or `most_bytes` of it. Where that takes a while the log
/// says so once. Throws UserError, and StopRequest as soon as `asked_to_stop` (may be empty), asked
/// meanwhile, says yes.
std::string read_stream(const std::filesystem::path& file, int64_t most_bytes,
                        const std::function<bool()>& asked_to_stop);

/// Throws UserError if a part of `path`, the last one too, is a symbolic link in a folder that everybody may
/// write to: anybody could have put it there. Parts that do not exist are no fault here. To be called before
/// a file or folder is made at `path`.
void refuse_shared_link(const std::filesystem::path& path);

/// Throws UserError, with the system's reason, unless `folder` is one that may be entered: `what` ("the
/// model's folder") cannot be opened, and `remedy`.
void require_folder(const std::filesystem::path& folder, std::string_view what, std::string_view remedy);

/// Makes a folder and what is missing above it, through no such link. Throws UserError: `what` ("the output
/// folder") cannot be made, and `remedy`.
void make_directory(const std::filesystem::path& directory, std::string_view what, std::string_view remedy);

/// Throws UserError where make_directory() would, and leaves nothing behind.
void require_makeable_directory(const std::filesystem::path& directory, std::string_view what,
                                std::string_view remedy);

/// Where a file comes to lie that is made at `path`: a link may lead to one that is yet to be made.
std::filesystem::path end_of_links(std::filesystem::path path);

}  // namespace longhalo
