// HDF5 files: what is written comes back, here and in h5py; foreign or damaged files are refused in words.
#include "storage/hdf5.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "scratch.hpp"
#include "storage/hdf5_writer.hpp"

namespace longhalo {
namespace {

using namespace testing;

TEST(Hdf5, WritesAndReadsBack) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "data.h5";
  std::vector<float> rows(7 * 5);
  std::iota(rows.begin(), rows.end(), 0.5F);
  std::vector<uint16_t> ids{0, 1, 65535};
  {
    Hdf5Writer writer(path, 1000);
    writer.file().set_attribute("name", "döcument");
    writer.file().set_attribute("nothing", "");
    writer.file().set_attribute("count", int64_t{-7});
    writer.file().set_attribute("ratio", 0.25);
    writer.file().write_strings("names", {"a", "", "long name ☃"});
    writer.file().write_strings("no_names", {});
    writer.create("rows", Hdf5Type::kFloat32, {7, 5});
    writer.append("rows", std::span<const float>(rows).first(10));
    writer.append("rows", std::span<const float>(rows).subspan(10));
    writer.write("ids", {3}, std::span<const uint16_t>(ids));
    writer.write("none", {0}, std::span<const int64_t>());
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.commit();
  }
  EXPECT_EQ(count_files(folder.path()), 1);
  const Hdf5File file = Hdf5File::open(path);
  EXPECT_EQ(file.string_attribute("name"), "döcument");
  EXPECT_EQ(file.string_attribute("nothing"), "");
  EXPECT_EQ(file.int_attribute("count"), -7);
  EXPECT_EQ(file.float_attribute("ratio"), 0.25);
  EXPECT_FALSE(file.has_attribute("absent"));
  EXPECT_EQ(file.read_strings("names"), (std::vector<std::string>{"a", "", "long name ☃"}));
  EXPECT_TRUE(file.read_strings("no_names").empty());
  const Hdf5Dataset stored = file.dataset("rows");
  stored.expect(Hdf5Type::kFloat32, std::array<int64_t, 2>{-1, 5});
  EXPECT_GT(stored.file_offset(), 0);
  std::vector<float> part(10);
  stored.read(3, std::span(part));
  EXPECT_EQ(part, std::vector<float>(rows.begin() + 15, rows.begin() + 25));
  std::vector<uint16_t> ids_back(3);
  file.dataset("ids").read(0, std::span(ids_back));
  EXPECT_EQ(ids_back, ids);
  EXPECT_EQ(file.dataset("none").rows(), 0);
}

TEST(Hdf5, RefusesWhatIsNotExpected) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "data.h5";
  const std::vector<float> values{1, 2, 3};
  Hdf5Writer writer(path, 0);
  writer.file().set_attribute("text", "x");
  writer.write("values", {3}, std::span<const float>(values));
  writer.file().write_strings("names", {"a"});
  writer.commit();
  const Hdf5File file = Hdf5File::open(path);
  expect_user_error([&] { file.dataset("absent"); }, {"missing", "dataset absent", path.string()});
  expect_user_error([&] { file.dataset("names"); }, {"type", "dataset names"});
  expect_user_error([&] { file.read_strings("values"); }, {"not a list of texts"});
  expect_user_error([&] { file.int_attribute("text"); }, {"not one integer", "attribute text"});
  expect_user_error([&] { file.string_attribute("absent"); }, {"missing", "attribute absent"});
  expect_user_error([&] { file.dataset("values").expect(Hdf5Type::kFloat32, std::array<int64_t, 1>{4}); },
                    {"float32 [3]", "float32 [4]"});
  expect_user_error([&] { file.dataset("values").expect(Hdf5Type::kInt64, std::array<int64_t, 1>{-1}); },
                    {"int64"});
  std::vector<float> out(4);
  EXPECT_THROW(file.dataset("values").read(0, std::span(out)), InvariantError);
  std::vector<int64_t> wrong(3);
  EXPECT_THROW(file.dataset("values").read(0, std::span(wrong)), InvariantError);

  expect_user_error([&] { Hdf5File::open(folder / "absent.h5"); }, {"No such file", "absent.h5"});
  expect_user_error([&] { Hdf5File::open(folder.path()); }, {"directory"});
  write_text(folder / "text.h5", "this is no HDF5 file");
  expect_user_error([&] { Hdf5File::open(folder / "text.h5"); }, {"text.h5", "HDF5: "});
  const std::string whole = read_text(path);
  write_text(folder / "cut.h5", whole.substr(0, whole.size() / 2));
  expect_user_error([&] { Hdf5File::open(folder / "cut.h5"); }, {"cut.h5", "truncated"});
}

TEST(Hdf5, NoticesDataChangedBehindItsBack) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "data.h5";
  write_text(path, "the old file");
  const std::vector<float> values(1000, 1.5F);
  Hdf5Writer writer(path, 4000);
  writer.write("values", {1000}, std::span<const float>(values));
  // A first verify() would pass; damage the disk's bytes once HDF5 has let go of them, as a bad disk would.
  writer.file().flush();
  std::filesystem::path temporary;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path() != path) temporary = entry.path();
  }
  const std::string written = read_text(temporary);
  const size_t at = written.find(std::string("\0\0\xc0\x3f\0\0\xc0\x3f", 8));
  ASSERT_NE(at, std::string::npos);
  std::fstream(temporary, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(at))
      .put('\1');
  expect_user_error([&] { writer.commit(); }, {"differs", "dataset values", path.string()});
  EXPECT_EQ(read_text(path), "the old file");
}

TEST(Hdf5, FullDiskIsFoundWhenSpaceIsReserved) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  const std::filesystem::path path = disk / "data.h5";
  write_text(path, "the old file");
  expect_user_error([&] { Hdf5Writer writer(path, 4 << 20); },
                    {"No space left", "4194304 bytes needed", "bytes free", path.string()});
  {
    Hdf5Writer writer(path, 0);
    expect_user_error([&] { writer.create("values", Hdf5Type::kFloat32, {1 << 20}); },
                      {"No space left", "4194304 bytes needed", "bytes free"});
  }
  EXPECT_EQ(read_text(path), "the old file");
  EXPECT_EQ(count_files(disk.path()), 1);
}

// Without a reservation HDF5 itself meets the full disk: one of write, flush, close has to say so.
TEST(Hdf5, FullDiskNeverLooksLikeSuccess) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  const std::vector<float> values(1000, 1.0F);
  expect_user_error(
      [&] {
        Hdf5File file = Hdf5File::create(disk / "data.h5", Hdf5File::Existing::kRefuse);
        Hdf5Dataset dataset = file.create_dataset("values", Hdf5Type::kFloat32, {1 << 20});
        for (int64_t row = 0; row + 1000 <= (1 << 20); row += 1000)
          dataset.write(row, std::span<const float>(values));
        file.flush();
        dataset.close();
        file.close();
      },
      {"No space left", "bytes free", "data.h5"});
}

TEST(Hdf5, FileSizeLimitIsReported) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "data.h5";
  write_text(path, "the old file");
  {
    const FileSizeLimit limit(100000);
    Hdf5Writer writer(path, 0);
    expect_user_error([&] { writer.create("values", Hdf5Type::kFloat32, {100000}); },
                      {"too large", "400000 bytes needed", "ulimit -f"});
  }
  EXPECT_EQ(read_text(path), "the old file");
  EXPECT_EQ(count_files(folder.path()), 1);
}

TEST(Hdf5, H5pyReadsWhatWeWriteAndWeReadWhatItWrites) {
  const std::string python = LONGHALO_PYTHON;
  if (std::system((python + " -c 'import h5py, numpy' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << python << " has no h5py; scripts/setup.sh installs it";
  }
  const ScratchFolder folder;
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  Hdf5Writer writer(folder / "ours.h5", 100);
  writer.file().set_attribute("name", "döc");
  writer.file().set_attribute("count", int64_t{1} << 40);
  writer.file().write_strings("names", {"☃", "b"});
  writer.write("values", {3, 2}, std::span<const float>(values));
  writer.commit();
  write_text(folder / "check.py", R"(
import h5py, numpy, sys
with h5py.File(sys.argv[1] + "/ours.h5") as file:
    value = file.attrs["name"]
    assert (value.decode() if isinstance(value, bytes) else str(value)) == "döc", value
    assert file.attrs["count"] == 1 << 40
    assert list(file["names"].asstr()) == ["☃", "b"]
    assert file["values"].dtype == numpy.float32 and file["values"].chunks is None
    assert numpy.array_equal(file["values"][:], numpy.arange(1, 7).reshape(3, 2))
with h5py.File(sys.argv[1] + "/theirs.h5", "w") as file:
    file.attrs["name"] = "døc"
    file["names"] = ["ä", "bc"]
    file.create_dataset("big_endian", data=numpy.array([1, 256, 65535], dtype=">u2"))
    file.create_dataset("packed", data=numpy.arange(10000, dtype="i8"), chunks=(1000,), compression="gzip")
)");
  ASSERT_EQ(
      std::system((python + " " + (folder / "check.py").string() + " " + folder.path().string()).c_str()), 0);
  const Hdf5File theirs = Hdf5File::open(folder / "theirs.h5");
  EXPECT_EQ(theirs.string_attribute("name"), "døc");
  EXPECT_EQ(theirs.read_strings("names"), (std::vector<std::string>{"ä", "bc"}));
  std::vector<uint16_t> ids(3);
  theirs.dataset("big_endian").read(0, std::span(ids));
  EXPECT_EQ(ids, (std::vector<uint16_t>{1, 256, 65535}));
  std::vector<int64_t> packed(2);
  theirs.dataset("packed").read(998, std::span(packed));
  EXPECT_EQ(packed, (std::vector<int64_t>{998, 999}));
  EXPECT_EQ(theirs.dataset("packed").file_offset(), -1);
}

}  // namespace
}  // namespace longhalo
