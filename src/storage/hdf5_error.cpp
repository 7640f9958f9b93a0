#include "storage/hdf5_error.hpp"

#include <cerrno>
#include <charconv>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

herr_t collect(unsigned, const H5E_error2_t* entry, void* into) noexcept {
  try {
    if (entry->desc != nullptr) static_cast<std::vector<std::string>*>(into)->emplace_back(entry->desc);
    return 0;
  } catch (...) {  // no memory for the text: an exception must not pass through C code
    return -1;
  }
}

// The system's error number, which HDF5 writes among its words; 0 where there is none.
int system_error_in(std::string_view words) {
  constexpr std::string_view kBefore = "errno = ";
  const size_t at = words.find(kBefore);
  int error = 0;
  if (at != std::string_view::npos)
    std::from_chars(words.data() + at + kBefore.size(), words.data() + words.size(), error);
  return error;
}

}  // namespace

static_assert(std::is_same_v<hid_t, int64_t>, "hdf5.hpp holds identifiers as int64_t");

void start_hdf5() {
  // NOTE: no clean-up by the library at exit. A file that could not be closed because the disk is full stays
  // in its books, and HDF5 1.10.8 crashes when it visits that file again. Every file is closed, and that
  // checked, by its owner.
  static const bool started = [] { return H5dont_atexit() >= 0 && H5open() >= 0; }();
  // Each thread has an error stack of its own.
  thread_local const bool quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  check(started && quiet, "the HDF5 library starts");
}

std::string hdf5_error_text() {
  std::vector<std::string> causes;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, collect, &causes);
  H5Eclear2(H5E_DEFAULT);
  if (causes.empty()) return "HDF5 gives no reason";
  // The innermost entry names the cause; the outermost what was asked for. Those between retell the call
  // stack.
  std::string result = "HDF5: " + causes.front();
  if (causes.size() > 1) result += " (" + causes.back() + ")";
  return result;
}

void throw_hdf5_read_error(std::string_view action, std::string_view where) {
  const std::string reason = hdf5_error_text();
  const std::string what = text("cannot ", action, ": ", reason);
  if (reason.find("unable to lock file") != std::string::npos)
    throw Hdf5LockError(what, where,
                        "another program has locked it, or its file system knows no locks; LongHalo asks for "
                        "none unless the environment has HDF5_USE_FILE_LOCKING: unset that variable");
  throw UserError(what, where,
                  "check that this is a complete HDF5 file of the expected kind (h5ls and h5dump show its "
                  "contents)");
}

void throw_hdf5_write_error(std::string_view action, std::string_view where,
                            const std::filesystem::path& file, int64_t bytes_needed) {
  const std::string reason = hdf5_error_text();
  const int error = system_error_in(reason);
  std::string what = text("cannot ", action, ": ", reason);
  const bool is_size = error == 0 || error == ENOSPC || error == EDQUOT || error == EFBIG;
  if (is_size && bytes_needed > 0) what += text("; ", bytes_needed, " bytes needed");
  if (is_size) what += text("; ", free_bytes(file), " bytes free on this file system");
  throw UserError(what, where, write_remedy(error == 0 ? ENOSPC : error));
}

Hdf5Id own_hdf5(hid_t id, Hdf5Id::Closer closer, std::string_view call) {
  if (id < 0) check(false, text(call, " succeeds; ", hdf5_error_text()));
  return Hdf5Id(id, closer);
}

hid_t hdf5_native(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint8:
      return H5T_NATIVE_UINT8;
    case Hdf5Type::kUint16:
      return H5T_NATIVE_UINT16;
    case Hdf5Type::kUint32:
      return H5T_NATIVE_UINT32;
    case Hdf5Type::kUint64:
      return H5T_NATIVE_UINT64;
    case Hdf5Type::kInt32:
      return H5T_NATIVE_INT32;
    case Hdf5Type::kInt64:
      return H5T_NATIVE_INT64;
    case Hdf5Type::kFloat32:
      return H5T_NATIVE_FLOAT;
    case Hdf5Type::kFloat64:
      return H5T_NATIVE_DOUBLE;
  }
  check(false, "every Hdf5Type has a native type");
  return -1;
}

std::string_view hdf5_type_name(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint8:
      return "uint8";
    case Hdf5Type::kUint16:
      return "uint16";
    case Hdf5Type::kUint32:
      return "uint32";
    case Hdf5Type::kUint64:
      return "uint64";
    case Hdf5Type::kInt32:
      return "int32";
    case Hdf5Type::kInt64:
      return "int64";
    case Hdf5Type::kFloat32:
      return "float32";
    case Hdf5Type::kFloat64:
      return "float64";
  }
  return "unknown";
}

int64_t hdf5_type_bytes(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint8:
      return 1;
    case Hdf5Type::kUint16:
      return 2;
    case Hdf5Type::kUint32:
    case Hdf5Type::kInt32:
    case Hdf5Type::kFloat32:
      return 4;
    case Hdf5Type::kUint64:
    case Hdf5Type::kInt64:
    case Hdf5Type::kFloat64:
      return 8;
  }
  return 0;
}

bool hdf5_is_thread_safe() {
  start_hdf5();
  hbool_t is_safe = false;
  return H5is_library_threadsafe(&is_safe) >= 0 && is_safe;
}

std::string hdf5_version() {
  start_hdf5();
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  H5get_libversion(&major, &minor, &release);
  return text(major, ".", minor, ".", release);
}

Hdf5Id::~Hdf5Id() {
  close();
}
Hdf5Id::Hdf5Id(Hdf5Id&& other) noexcept : id_(std::exchange(other.id_, -1)), closer_(other.closer_) {}
Hdf5Id& Hdf5Id::operator=(Hdf5Id&& other) noexcept {
  std::swap(id_, other.id_);
  std::swap(closer_, other.closer_);
  return *this;
}
bool Hdf5Id::close() {
  if (id_ < 0) return true;
  return closer_(std::exchange(id_, -1)) >= 0;
}

}  // namespace longhalo
