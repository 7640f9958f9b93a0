// What the HDF5 room's own files share: the library started once with its printing off, and return codes
// turned into UserErrors that carry the library's error stack. Included by .cpp files only.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "storage/hdf5.hpp"

namespace longhalo {

/// Starts the library and turns its automatic error printing off. Call before the first H5 function.
void start_hdf5();

/// The library's current error stack on one line, innermost cause first.
std::string hdf5_error_text();

/// Throw UserError for a failed call: what was being done, and where (file, dataset).
[[noreturn]] void throw_hdf5_read_error(std::string_view action, std::string_view where);
/// The same for writing: adds bytes needed and bytes free.
[[noreturn]] void throw_hdf5_write_error(std::string_view action, std::string_view where,
                                         const std::filesystem::path& file, int64_t bytes_needed);

/// Owns `id`, or throws InvariantError: for calls that fail only when LongHalo or memory is at fault.
Hdf5Id own_hdf5(hid_t id, Hdf5Id::Closer closer, std::string_view call);

/// The library's identifier of a type as this machine holds it in memory.
hid_t hdf5_native(Hdf5Type type);

namespace close_hdf5 {
inline int file(int64_t id) {
  return H5Fclose(id);
}
inline int dataset(int64_t id) {
  return H5Dclose(id);
}
inline int dataspace(int64_t id) {
  return H5Sclose(id);
}
inline int datatype(int64_t id) {
  return H5Tclose(id);
}
inline int attribute(int64_t id) {
  return H5Aclose(id);
}
inline int properties(int64_t id) {
  return H5Pclose(id);
}
}  // namespace close_hdf5

}  // namespace longhalo
