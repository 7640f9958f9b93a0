// Reading a file of another program for the first time where a crash can do no harm. The HDF5 library trusts
// what a file says of itself: some files with one changed byte make it crash or never end, and a rank that
// crashes takes the job with it and says nothing of the file.
#pragma once

#include <filesystem>
#include <functional>

namespace longhalo {

/// Does `read` in a child process and throws UserError, naming `file`, if the child crashed or computed
/// longer than `most_seconds`. An exception of `read` is no fault here: the caller reads again and meets it.
/// `read` may use neither MPI nor a GPU nor other threads. Where there can be no child, nothing is tried.
void try_to_read(const std::filesystem::path& file, double most_seconds, const std::function<void()>& read);

}  // namespace longhalo
