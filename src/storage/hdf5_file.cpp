#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/hdf5.hpp"
#include "storage/hdf5_error.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

Hdf5Id file_access() {
  Hdf5Id access = own_hdf5(H5Pcreate(H5P_FILE_ACCESS), close_hdf5::properties, "H5Pcreate");
  // Our files are never changed in place while the library has them open, so its lock protects nothing, while
  // on some network disks it blocks or refuses the open. The environment variable HDF5_USE_FILE_LOCKING=TRUE
  // still overrules this.
  check(H5Pset_file_locking(access.get(), false, true) >= 0, "H5Pset_file_locking succeeds");
  return access;
}

// Contiguous, allocated at once, never filled with zeros that the data would overwrite anyway.
Hdf5Id contiguous() {
  Hdf5Id layout = own_hdf5(H5Pcreate(H5P_DATASET_CREATE), close_hdf5::properties, "H5Pcreate");
  check(H5Pset_layout(layout.get(), H5D_CONTIGUOUS) >= 0 &&
            H5Pset_alloc_time(layout.get(), H5D_ALLOC_TIME_EARLY) >= 0 &&
            H5Pset_fill_time(layout.get(), H5D_FILL_TIME_NEVER) >= 0 &&
            H5Pset_obj_track_times(layout.get(), false) >= 0,  // the same data gives the same bytes
        "the contiguous layout can be set");
  return layout;
}

Hdf5Id fixed_string(size_t bytes) {
  Hdf5Id type = own_hdf5(H5Tcopy(H5T_C_S1), close_hdf5::datatype, "H5Tcopy");
  check(H5Tset_size(type.get(), std::max<size_t>(bytes, 1)) >= 0 &&
            H5Tset_cset(type.get(), H5T_CSET_UTF8) >= 0 && H5Tset_strpad(type.get(), H5T_STR_NULLPAD) >= 0,
        "the string type can be set");
  return type;
}

void write_attribute(hid_t owner, const std::string& key, hid_t type, const void* value,
                     const std::filesystem::path& file, std::string_view where) {
  const Hdf5Id space = own_hdf5(H5Screate(H5S_SCALAR), close_hdf5::dataspace, "H5Screate");
  Hdf5Id attribute(H5Acreate2(owner, key.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT),
                   close_hdf5::attribute);
  const auto bytes = static_cast<int64_t>(H5Tget_size(type));
  if (attribute.get() < 0 || H5Awrite(attribute.get(), type, value) < 0 || !attribute.close()) {
    throw_hdf5_write_error(text("write attribute ", key), where, file, bytes);
  }
}

void write_attribute(hid_t owner, const std::string& key, std::string_view value,
                     const std::filesystem::path& file, std::string_view where) {
  const std::string stored = value.empty() ? std::string(1, '\0') : std::string(value);
  write_attribute(owner, key, fixed_string(stored.size()).get(), stored.data(), file, where);
}

Hdf5Id open_attribute(hid_t file, const std::string& key, H5T_class_t kind, std::string_view kind_name,
                      const std::filesystem::path& path) {
  const std::string where = text(path.string(), ", attribute ", key);
  if (H5Aexists(file, key.c_str()) <= 0) {
    throw UserError("this attribute is missing", where, "use a file of the expected kind");
  }
  Hdf5Id attribute(H5Aopen(file, key.c_str(), H5P_DEFAULT), close_hdf5::attribute);
  if (attribute.get() < 0) throw_hdf5_read_error("open it", where);
  const Hdf5Id type = own_hdf5(H5Aget_type(attribute.get()), close_hdf5::datatype, "H5Aget_type");
  const Hdf5Id space = own_hdf5(H5Aget_space(attribute.get()), close_hdf5::dataspace, "H5Aget_space");
  if (H5Tget_class(type.get()) != kind || H5Sget_simple_extent_npoints(space.get()) != 1) {
    throw UserError(text("this attribute is not one ", kind_name), where, "use a file of the expected kind");
  }
  return attribute;
}

// The values of a dataset can lie in other files: behind a link, in a list of raw files, or as a view of
// datasets elsewhere. A file that was given to be read must not make us read others.
void refuse_other_files(hid_t dataset, const std::string& where) {
  const Hdf5Id made = own_hdf5(H5Dget_create_plist(dataset), close_hdf5::properties, "H5Dget_create_plist");
  if (H5Pget_layout(made.get()) != H5D_VIRTUAL && H5Pget_external_count(made.get()) == 0) return;
  throw UserError("the values of this dataset lie in other files", where,
                  "copy them into this file (h5repack does)");
}

// A dataset may say that it has more values than any memory holds and store none of them: those would all be
// read as zeros. The best of the library's filters makes a thousandth of what it is given.
void refuse_unwritten(hid_t dataset, const std::string& where) {
  constexpr hsize_t kMostCompressed = 1100;
  const Hdf5Id type = own_hdf5(H5Dget_type(dataset), close_hdf5::datatype, "H5Dget_type");
  const Hdf5Id space = own_hdf5(H5Dget_space(dataset), close_hdf5::dataspace, "H5Dget_space");
  const hssize_t values = H5Sget_simple_extent_npoints(space.get());
  hsize_t bytes = 0, stored = 0;
  const bool is_written =
      values >= 0 && !__builtin_mul_overflow(H5Tget_size(type.get()), static_cast<hsize_t>(values), &bytes) &&
      !__builtin_mul_overflow(H5Dget_storage_size(dataset), kMostCompressed, &stored) && bytes <= stored;
  if (is_written) return;
  throw UserError(text("it has ", values, " values by its shape, and most of them were never written"), where,
                  "make the file again; the program that wrote it did not finish");
}

void refuse_links(hid_t file, const std::string& name, const std::string& where) {
  for (size_t end = name.find('/', 1);; end = name.find('/', end + 1)) {
    H5L_info_t link;
    if (H5Lget_info(file, name.substr(0, end).c_str(), &link, H5P_DEFAULT) < 0)
      throw_hdf5_read_error("look it up", where);
    if (link.type != H5L_TYPE_HARD)
      throw UserError("there is a link to another place instead of the dataset", where,
                      "put the dataset itself there");
    if (end == std::string::npos) return;
  }
}

Hdf5Id open_dataset(hid_t file, const std::string& name, const std::string& where) {
  refuse_links(file, name, where);
  Hdf5Id id(H5Dopen2(file, name.c_str(), H5P_DEFAULT), close_hdf5::dataset);
  if (id.get() < 0) throw_hdf5_read_error("open it as a dataset", where);
  refuse_other_files(id.get(), where);
  refuse_unwritten(id.get(), where);
  return id;
}

std::string unpadded(std::string_view stored) {
  return std::string(stored.substr(0, stored.find('\0')));
}

}  // namespace

Hdf5File Hdf5File::create(const std::filesystem::path& path, Existing existing, int64_t alignment_bytes) {
  start_hdf5();
  const Hdf5Id access = file_access();
  const auto alignment = static_cast<hsize_t>(alignment_bytes);
  check(H5Pset_alignment(access.get(), alignment, alignment) >= 0, "H5Pset_alignment succeeds");
  Hdf5Id id(H5Fcreate(path.c_str(), existing == Existing::kRefuse ? H5F_ACC_EXCL : H5F_ACC_TRUNC, H5P_DEFAULT,
                      access.get()),
            close_hdf5::file);
  if (id.get() < 0) throw_hdf5_write_error("create the file", path.string(), path, 0);
  return Hdf5File(std::move(id), path);
}

Hdf5File Hdf5File::open(const std::filesystem::path& path) {
  start_hdf5();
  open_input(
      path);  // plain words for what the library calls "unable to open file": missing, a folder, no right
  const Hdf5Id access = file_access();
  Hdf5Id id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), close_hdf5::file);
  if (id.get() < 0) throw_hdf5_read_error("open it as an HDF5 file", path.string());
  return Hdf5File(std::move(id), path);
}

bool Hdf5File::contains(const std::string& name) const {
  return H5Lexists(id_.get(), name.c_str(), H5P_DEFAULT) > 0;
}

Hdf5Dataset Hdf5File::create_dataset(const std::string& name, Hdf5Type type,
                                     const std::vector<int64_t>& shape) {
  check(shape.size() == 1 || shape.size() == 2, "a dataset has one or two dimensions");
  std::array<hsize_t, 2> lengths{};
  int64_t bytes = hdf5_type_bytes(type);
  for (size_t i = 0; i < shape.size(); ++i) {
    check(shape[i] >= 0 && !__builtin_mul_overflow(bytes, shape[i], &bytes), "a dataset's size fits 64 bits");
    lengths[i] = static_cast<hsize_t>(shape[i]);
  }
  const Hdf5Id space = own_hdf5(H5Screate_simple(static_cast<int>(shape.size()), lengths.data(), nullptr),
                                close_hdf5::dataspace, "H5Screate_simple");
  const Hdf5Id layout = contiguous();
  const Hdf5Id links = own_hdf5(H5Pcreate(H5P_LINK_CREATE), close_hdf5::properties, "H5Pcreate");
  check(H5Pset_create_intermediate_group(links.get(), 1) >= 0, "groups can be made on the way");
  Hdf5Id id(H5Dcreate2(id_.get(), name.c_str(), hdf5_native(type), space.get(), links.get(), layout.get(),
                       H5P_DEFAULT),
            close_hdf5::dataset);
  if (id.get() < 0) {
    throw_hdf5_write_error("create the dataset", text(path_.string(), ", dataset ", name), path_, bytes);
  }
  return Hdf5Dataset(std::move(id), path_, name);
}

Hdf5Dataset Hdf5File::dataset(const std::string& name) const {
  const std::string where = text(path_.string(), ", dataset ", name);
  if (!contains(name)) throw UserError("this dataset is missing", where, "use a file of the expected kind");
  return Hdf5Dataset(open_dataset(id_.get(), name, where), path_, name);
}

void Hdf5File::write_strings(const std::string& name, const std::vector<std::string>& values) {
  size_t longest = 1;
  for (const std::string& value : values)
    longest = std::max(longest, value.size());
  std::string packed(longest * values.size(), '\0');
  for (size_t i = 0; i < values.size(); ++i)
    values[i].copy(packed.data() + i * longest, longest);
  const Hdf5Id type = fixed_string(longest);
  const auto count = static_cast<hsize_t>(values.size());
  const Hdf5Id space =
      own_hdf5(H5Screate_simple(1, &count, nullptr), close_hdf5::dataspace, "H5Screate_simple");
  const Hdf5Id layout = contiguous();
  Hdf5Id id(
      H5Dcreate2(id_.get(), name.c_str(), type.get(), space.get(), H5P_DEFAULT, layout.get(), H5P_DEFAULT),
      close_hdf5::dataset);
  const bool written =
      id.get() >= 0 &&
      (values.empty() || H5Dwrite(id.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, packed.data()) >= 0) &&
      id.close();
  if (!written) {
    throw_hdf5_write_error("write the texts", text(path_.string(), ", dataset ", name), path_,
                           static_cast<int64_t>(packed.size()));
  }
}

std::vector<std::string> Hdf5File::read_strings(const std::string& name) const {
  const std::string where = text(path_.string(), ", dataset ", name);
  if (!contains(name)) throw UserError("this dataset is missing", where, "use a file of the expected kind");
  const Hdf5Id id = open_dataset(id_.get(), name, where);
  const Hdf5Id type = own_hdf5(H5Dget_type(id.get()), close_hdf5::datatype, "H5Dget_type");
  const Hdf5Id space = own_hdf5(H5Dget_space(id.get()), close_hdf5::dataspace, "H5Dget_space");
  const hssize_t points = H5Sget_simple_extent_npoints(space.get());
  if (H5Tget_class(type.get()) != H5T_STRING || H5Sget_simple_extent_ndims(space.get()) != 1 || points < 0) {
    throw UserError("this dataset is not a list of texts", where, "use a file of the expected kind");
  }
  const auto count = static_cast<size_t>(points);
  std::vector<std::string> values;
  values.reserve(count);
  if (H5Tis_variable_str(type.get()) > 0) {  // as h5py writes them
    std::vector<char*> texts(count, nullptr);
    if (count > 0 && H5Dread(id.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, texts.data()) < 0) {
      throw_hdf5_read_error("read it", where);
    }
    for (const char* value : texts)
      values.emplace_back(value == nullptr ? "" : value);
    H5Dvlen_reclaim(type.get(), space.get(), H5P_DEFAULT, texts.data());
    return values;
  }
  const size_t width = H5Tget_size(type.get());
  std::string packed(width * count, '\0');
  if (count > 0 && H5Dread(id.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, packed.data()) < 0) {
    throw_hdf5_read_error("read it", where);
  }
  for (size_t i = 0; i < count; ++i)
    values.push_back(unpadded(std::string_view(packed).substr(i * width, width)));
  return values;
}

void Hdf5Dataset::set_attribute(const std::string& key, std::string_view value) {
  write_attribute(id_.get(), key, value, file_, where());
}
void Hdf5File::set_attribute(const std::string& key, std::string_view value) {
  write_attribute(id_.get(), key, value, path_, path_.string());
}
void Hdf5File::set_attribute(const std::string& key, int64_t value) {
  write_attribute(id_.get(), key, H5T_NATIVE_INT64, &value, path_, path_.string());
}
void Hdf5File::set_attribute(const std::string& key, double value) {
  write_attribute(id_.get(), key, H5T_NATIVE_DOUBLE, &value, path_, path_.string());
}

bool Hdf5File::has_attribute(const std::string& key) const {
  return H5Aexists(id_.get(), key.c_str()) > 0;
}

std::string Hdf5File::string_attribute(const std::string& key) const {
  const Hdf5Id attribute = open_attribute(id_.get(), key, H5T_STRING, "text", path_);
  const Hdf5Id type = own_hdf5(H5Aget_type(attribute.get()), close_hdf5::datatype, "H5Aget_type");
  const std::string where = text(path_.string(), ", attribute ", key);
  if (H5Tis_variable_str(type.get()) > 0) {
    char* value = nullptr;
    if (H5Aread(attribute.get(), type.get(), &value) < 0) throw_hdf5_read_error("read it", where);
    std::string result = value == nullptr ? "" : value;
    H5free_memory(value);
    return result;
  }
  hsize_t file_bytes = 0;
  const size_t bytes = H5Tget_size(type.get());
  if (H5Fget_filesize(id_.get(), &file_bytes) < 0 || bytes > file_bytes)
    throw UserError("this text is longer than the file", where, "use a file of the expected kind");
  std::string value(bytes, '\0');
  if (H5Aread(attribute.get(), type.get(), value.data()) < 0) throw_hdf5_read_error("read it", where);
  return unpadded(value);
}

int64_t Hdf5File::int_attribute(const std::string& key) const {
  const Hdf5Id attribute = open_attribute(id_.get(), key, H5T_INTEGER, "integer", path_);
  int64_t value = 0;
  if (H5Aread(attribute.get(), H5T_NATIVE_INT64, &value) < 0) {
    throw_hdf5_read_error("read it", text(path_.string(), ", attribute ", key));
  }
  return value;
}

double Hdf5File::float_attribute(const std::string& key) const {
  const Hdf5Id attribute = open_attribute(id_.get(), key, H5T_FLOAT, "floating-point number", path_);
  double value = 0;
  if (H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, &value) < 0) {
    throw_hdf5_read_error("read it", text(path_.string(), ", attribute ", key));
  }
  return value;
}

void Hdf5File::flush() {
  if (H5Fflush(id_.get(), H5F_SCOPE_GLOBAL) < 0) throw_hdf5_write_error("flush it", path_.string(), path_, 0);
}

void Hdf5File::close() {
  if (id_.get() < 0) return;
  flush();
  if (!id_.close()) throw_hdf5_write_error("close it", path_.string(), path_, 0);
}

}  // namespace longhalo
