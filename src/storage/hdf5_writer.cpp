#include "storage/hdf5_writer.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

// Checked before the temporary file is made, so that a full disk does not leave even an empty one.
const std::filesystem::path& with_space(const std::filesystem::path& target, int64_t bytes_needed) {
  require_space(target, bytes_needed);
  return target;
}

}  // namespace

Hdf5Writer::Hdf5Writer(const std::filesystem::path& target, int64_t bytes_needed)
    : temporary_(with_space(target, bytes_needed)),
      file_(Hdf5File::create(temporary_.path(), Hdf5File::Existing::kRefuse)),
      bytes_needed_(bytes_needed) {}

void Hdf5Writer::create(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape) {
  check(!verified_ && !outputs_.contains(name), "a dataset is created once, before verify()");
  Hdf5Dataset dataset = file_.create_dataset(name, type, shape);
  int64_t bytes = hdf5_type_bytes(type);
  for (const int64_t length : shape)
    bytes *= length;
  const int64_t offset = dataset.file_offset();
  if (bytes > 0 && offset >= 0) {
    // HDF5's early allocation only moves the end of the file; this takes the blocks, so that a full disk or
    // quota shows now and not in the middle of the data.
    const FileDescriptor descriptor(::open(temporary_.path().c_str(), O_RDWR | O_CLOEXEC));
    if (!descriptor.is_open()) throw_file_error(errno, "open", temporary_.path());
    const int error = ::posix_fallocate(descriptor.get(), offset, bytes);
    if (error != 0 && error != EOPNOTSUPP && error != EINVAL) {
      throw_write_error(error, temporary_.target(), std::max(bytes, bytes_needed_));
    }
  }
  outputs_.emplace(name, Output{std::move(dataset), 0, {}});
}

Hdf5Writer::Output& Hdf5Writer::output_of(const std::string& name) {
  const auto found = outputs_.find(name);
  check(found != outputs_.end() && !verified_, "data is appended to a created dataset, before verify()");
  return found->second;
}

int64_t Hdf5Writer::rows_in(const Output& output, int64_t values) {
  const int64_t width = output.dataset.row_values();
  return width == 0 ? 0 : values / width;
}

void Hdf5Writer::verify() {
  if (verified_) return;
  for (auto& [name, output] : outputs_) {
    check(output.rows_written == output.dataset.rows() || output.dataset.row_values() == 0,
          text("all rows of ", name, " were written"));
  }
  // Flushed before any dataset is closed: see hdf5.hpp.
  file_.flush();
  for (auto& [name, output] : outputs_)
    output.dataset.close();
  file_.close();
  temporary_.sync();
  read_back();
  verified_ = true;
}

void Hdf5Writer::read_back() const {
  const Hdf5File file = Hdf5File::open(temporary_.path());
  for (const auto& [name, output] : outputs_) {
    const Hdf5Dataset stored = file.dataset(name);
    stored.expect(output.dataset.type(), output.dataset.shape());
    if (stored.checksum() != output.checksum.value()) {
      throw UserError("what was read back differs from what was written",
                      text(temporary_.target().string(), ", dataset ", name),
                      "the disk or file system is damaged; choose another place");
    }
  }
}

void Hdf5Writer::commit_to(const std::filesystem::path& place) {
  verify();
  temporary_.commit_to(place);
}

}  // namespace longhalo
