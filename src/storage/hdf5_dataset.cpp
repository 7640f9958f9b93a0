#include <algorithm>
#include <array>
#include <optional>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/checksum.hpp"
#include "storage/hdf5.hpp"
#include "storage/hdf5_error.hpp"
#include "storage/shape_text.hpp"

namespace longhalo {
namespace {

// The type that values of this stored type are read as; byte order may differ, the library converts it.
std::optional<Hdf5Type> type_of(hid_t stored) {
  const H5T_class_t kind = H5Tget_class(stored);
  const size_t bytes = H5Tget_size(stored);
  if (kind == H5T_FLOAT && bytes == 4) return Hdf5Type::kFloat32;
  if (kind == H5T_FLOAT && bytes == 8) return Hdf5Type::kFloat64;
  if (kind != H5T_INTEGER) return std::nullopt;
  const bool is_signed = H5Tget_sign(stored) == H5T_SGN_2;
  if (!is_signed && bytes == 1) return Hdf5Type::kUint8;
  if (!is_signed && bytes == 2) return Hdf5Type::kUint16;
  if (!is_signed && bytes == 4) return Hdf5Type::kUint32;
  if (!is_signed && bytes == 8) return Hdf5Type::kUint64;
  if (is_signed && bytes == 4) return Hdf5Type::kInt32;
  if (is_signed && bytes == 8) return Hdf5Type::kInt64;
  return std::nullopt;
}

}  // namespace

Hdf5Dataset::Hdf5Dataset(Hdf5Id id, std::filesystem::path file, std::string name)
    : id_(std::move(id)), file_(std::move(file)), name_(std::move(name)) {
  const Hdf5Id stored = own_hdf5(H5Dget_type(id_.get()), close_hdf5::datatype, "H5Dget_type");
  const Hdf5Id space = own_hdf5(H5Dget_space(id_.get()), close_hdf5::dataspace, "H5Dget_space");
  const std::optional<Hdf5Type> type = type_of(stored.get());
  if (!type) {
    throw UserError("its values are of a type that LongHalo does not read", where(),
                    "store unsigned 8/16/32/64-bit, signed 32/64-bit integers or 32/64-bit floats");
  }
  type_ = *type;
  const int dimensions = H5Sget_simple_extent_ndims(space.get());
  if (dimensions != 1 && dimensions != 2) {
    throw UserError(text("it has ", dimensions, " dimensions"), where(),
                    "store arrays of one or two dimensions");
  }
  std::array<hsize_t, 2> lengths{};
  H5Sget_simple_extent_dims(space.get(), lengths.data(), nullptr);
  for (int i = 0; i < dimensions; ++i)
    shape_.push_back(static_cast<int64_t>(lengths[static_cast<size_t>(i)]));
}

std::string Hdf5Dataset::where() const {
  return text(file_.string(), ", dataset ", name_);
}

int64_t Hdf5Dataset::file_offset() const {
  const haddr_t offset = H5Dget_offset(id_.get());
  return offset == HADDR_UNDEF ? -1 : static_cast<int64_t>(offset);
}

void Hdf5Dataset::expect(Hdf5Type type, std::span<const int64_t> shape) const {
  bool same = type == type_ && shape.size() == shape_.size();
  for (size_t i = 0; same && i < shape.size(); ++i)
    same = shape[i] < 0 || shape[i] == shape_[i];
  if (same) return;
  throw UserError(text("it holds ", hdf5_type_name(type_), " ", shape_text(shape_), " where ",
                       hdf5_type_name(type), " ", shape_text(shape), " is expected (-1: any length)"),
                  where(), "use a file of the expected kind");
}

Hdf5Id Hdf5Dataset::select(int64_t first_row, int64_t values, Hdf5Type type, Hdf5Id& memory_space) const {
  check(type == type_, text("rows of ", name_, " are moved as the type they are stored in"));
  const int64_t width = row_values();
  const int64_t row_count = width == 0 ? 0 : values / width;
  check(values == row_count * width, text("whole rows of ", name_, " are moved"));
  check(first_row >= 0 && row_count <= rows() && first_row <= rows() - row_count,
        text("rows ", first_row, " to ", first_row + row_count, " are rows of ", name_));
  const std::array<hsize_t, 2> start{static_cast<hsize_t>(first_row), 0};
  const std::array<hsize_t, 2> count{static_cast<hsize_t>(row_count), static_cast<hsize_t>(width)};
  Hdf5Id file_space = own_hdf5(H5Dget_space(id_.get()), close_hdf5::dataspace, "H5Dget_space");
  const herr_t selected =
      H5Sselect_hyperslab(file_space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr);
  check(selected >= 0, "H5Sselect_hyperslab succeeds");
  const auto flat = static_cast<hsize_t>(values);
  memory_space = own_hdf5(H5Screate_simple(1, &flat, nullptr), close_hdf5::dataspace, "H5Screate_simple");
  return file_space;
}

void Hdf5Dataset::write_rows(int64_t first_row, const void* data, int64_t values, Hdf5Type type) {
  if (values == 0) return;
  Hdf5Id memory_space;
  const Hdf5Id file_space = select(first_row, values, type, memory_space);
  if (H5Dwrite(id_.get(), hdf5_native(type), memory_space.get(), file_space.get(), H5P_DEFAULT, data) < 0) {
    throw_hdf5_write_error("write rows", where(), file_, values * hdf5_type_bytes(type));
  }
}

void Hdf5Dataset::read_rows(int64_t first_row, void* data, int64_t values, Hdf5Type type) const {
  if (values == 0) return;
  Hdf5Id memory_space;
  const Hdf5Id file_space = select(first_row, values, type, memory_space);
  if (H5Dread(id_.get(), hdf5_native(type), memory_space.get(), file_space.get(), H5P_DEFAULT, data) < 0) {
    throw_hdf5_read_error(text("read ", values, " values from row ", first_row), where());
  }
}

uint64_t Hdf5Dataset::checksum() const {
  constexpr int64_t kBlockBytes = int64_t{4} << 20;
  const int64_t row_bytes = std::max<int64_t>(row_values() * hdf5_type_bytes(type_), 1);
  const int64_t rows_a_block = std::max<int64_t>(kBlockBytes / row_bytes, 1);
  std::vector<std::byte> block(static_cast<size_t>(std::min(rows_a_block, rows()) * row_bytes));
  Checksum64 sum;
  for (int64_t row = 0; row_values() > 0 && row < rows(); row += rows_a_block) {
    const int64_t count = std::min(rows_a_block, rows() - row);
    read_rows(row, block.data(), count * row_values(), type_);
    sum.update(std::span(block).first(static_cast<size_t>(count * row_bytes)));
  }
  return sum.value();
}

void Hdf5Dataset::close() {
  if (!id_.close()) throw_hdf5_write_error("close the dataset", where(), file_, 0);
}

}  // namespace longhalo
