// Activations come back as they were put, from disk and from host memory; every fault becomes one clear error
// and never a wrong byte.
#include "storage/activation_store.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "core/error.hpp"
#include "core/text.hpp"
#include "scratch.hpp"
#include "small_store.hpp"
#include "storage/checksum.hpp"
#include "storage/disk_activation_store.hpp"
#include "storage/hdf5.hpp"

namespace longhalo {
namespace {

using namespace testing;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(int64_t count) {
  static std::mt19937_64 random(std::random_device{}());
  Bytes bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(random());
  return bytes;
}

void flip(const DiskActivationStore& store, int layer, int64_t at, std::byte change) {
  // Where the layer's bytes lie is HDF5's to say.
  const Hdf5File file = Hdf5File::open(store.file());
  const int64_t offset = file.dataset(text("/step_state/layer_00", layer, "/x")).file_offset() + at;
  const int descriptor = ::open(store.file().c_str(), O_RDWR | O_CLOEXEC);
  std::byte byte{};
  EXPECT_EQ(::pread(descriptor, &byte, 1, offset), 1);
  byte ^= change;
  EXPECT_EQ(::pwrite(descriptor, &byte, 1, offset), 1);
  ::close(descriptor);
}

enum class Kind { kHost, kDirect, kBuffered };

class AnyStore : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<ActivationStore> make(const ActivationShape& shape) {
    if (GetParam() == Kind::kHost) return std::make_unique<HostActivationStore>(shape);
    DiskStoreOptions options = small_options(folder_.path(), shape);
    if (GetParam() == Kind::kBuffered) options.direct = DirectIo::kNever;
    auto store = std::make_unique<DiskActivationStore>(options);
    if (GetParam() == Kind::kBuffered) {
      EXPECT_FALSE(store->is_direct());
    }
    return store;
  }
  ScratchFolder folder_;
};

TEST_P(AnyStore, GivesBackWhatWasPut) {
  for (const ActivationShape& shape : {kOddShape, ActivationShape{{0, 1, 2}, 1, 3, ActivationType::kFloat32},
                                       ActivationShape{{0, 1, 2}, 64, 4096, ActivationType::kFloat32},
                                       ActivationShape{{5}, 0, 128, ActivationType::kBfloat16}}) {
    const std::unique_ptr<ActivationStore> store = make(shape);
    for (int step = 0; step < 3; ++step) {
      std::vector<Bytes> kept;
      for (const int layer : shape.layers) {
        kept.push_back(random_bytes(shape.layer_bytes()));
        if (step == 1) {  // filled chunk by chunk on the store's threads
          store->put_from(layer, [&bytes = kept.back()](int64_t offset, std::span<std::byte> into) {
            std::copy_n(bytes.begin() + offset, into.size(), into.begin());
          });
          store->finish_put(layer);
        } else {
          Bytes passing = kept.back();
          store->put(layer, passing);
          std::fill(passing.begin(), passing.end(), std::byte{0xee});  // the store no longer needs it
        }
      }
      store->start_fetch(shape.layers.back());
      for (size_t i = shape.layers.size(); i-- > 0;) {
        if (i > 0) store->start_fetch(shape.layers[i - 1]);
        Bytes got(kept[i].size(), std::byte{0x55});
        store->get(shape.layers[i], got);
        ASSERT_TRUE(got == kept[i]) << "step " << step << " layer " << shape.layers[i];
      }
    }
    const StoreFigures figures = store->figures();
    EXPECT_EQ(figures.bytes_put, 3 * shape.total_bytes());
    EXPECT_EQ(figures.bytes_fetched, 3 * shape.total_bytes());
  }
}

TEST_P(AnyStore, TakesAnyOrder) {
  const std::unique_ptr<ActivationStore> store = make(kOddShape);
  std::vector<Bytes> kept(kOddShape.layers.size());
  std::mt19937 random(std::random_device{}());
  const auto put = [&](size_t i) {
    kept[i] = random_bytes(kOddShape.layer_bytes());
    store->put(kOddShape.layers[i], kept[i]);
  };
  for (size_t i = 0; i < kept.size(); ++i)
    put(i);
  Bytes got(kept[0].size());
  for (int round = 0; round < 300; ++round) {
    const size_t i = random() % kept.size();
    switch (random() % 4) {
      case 0:
        put(i);  // also of a layer that is being fetched or still written
        break;
      case 1:
        store->start_fetch(kOddShape.layers[i]);
        break;
      default:
        store->get(kOddShape.layers[i], got);
        ASSERT_TRUE(got == kept[i]) << "round " << round;
    }
  }
}

TEST_P(AnyStore, SinkSeesBytesInOrderAndMayGiveUp) {
  const std::unique_ptr<ActivationStore> store = make(kOddShape);
  const Bytes kept = random_bytes(kOddShape.layer_bytes());
  store->put(4, kept);
  EXPECT_THROW(store->get_to(4, [](int64_t, std::span<const std::byte>) { throw std::runtime_error("no"); }),
               std::runtime_error);
  for (int again = 0; again < 3; ++again) {
    Bytes got;
    store->get_to(4, [&](int64_t offset, std::span<const std::byte> from) {
      EXPECT_EQ(offset, static_cast<int64_t>(got.size()));
      got.insert(got.end(), from.begin(), from.end());
    });
    EXPECT_TRUE(got == kept);
  }
}

TEST_P(AnyStore, RefusesMisuse) {
  const std::unique_ptr<ActivationStore> store = make(kOddShape);
  Bytes bytes(static_cast<size_t>(kOddShape.layer_bytes()));
  EXPECT_THROW(store->get(0, bytes), InvariantError);
  EXPECT_THROW(store->start_fetch(0), InvariantError);
  EXPECT_THROW(store->put(1, bytes), InvariantError);
  EXPECT_THROW(store->put(0, std::span(bytes).first(10)), InvariantError);
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyStore, ::testing::Values(Kind::kHost, Kind::kDirect, Kind::kBuffered),
                         [](const auto& tested) {
                           return std::string(tested.param == Kind::kHost     ? "Host"
                                              : tested.param == Kind::kDirect ? "Direct"
                                                                              : "Buffered");
                         });

TEST(DiskStore, IsValidHdf5WhileItLives) {
  const std::string python = LONGHALO_PYTHON;
  if (std::system((python + " -c 'import h5py, numpy' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << python << " has no h5py; scripts/setup.sh installs it";
  }
  const ScratchFolder folder;
  DiskActivationStore store(small_options(folder.path()));
  write_text(folder / "check.py", R"(
import h5py, numpy, sys
expected = numpy.fromfile(sys.argv[2], dtype="u2").reshape(1237, 33)
with h5py.File(sys.argv[1], "r") as file:
    assert sorted(file["step_state"]) == ["layer_000", "layer_002", "layer_004", "layer_006"]
    data = file["step_state/layer_004/x"]
    assert data.attrs["dtype"] in ("bfloat16", b"bfloat16") and data.dtype == numpy.uint16 and data.chunks is None
    assert data.id.get_offset() % 4096 == 0
    assert numpy.array_equal(data[:], expected)
    assert file.attrs["chunk_bytes"] == 8192
    assert file["step_state/layer_004/checksums"].shape == (10,)
    if len(sys.argv) > 3:
        assert file["step_state/layer_004/checksums"][9] == int(sys.argv[3])
)");
  const auto agrees = [&](const Bytes& bytes, const std::filesystem::path& file,
                          const std::string& checksum) {
    write_text(folder / "expected",
               std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    return std::system((python + " " + (folder / "check.py").string() + " '" + file.string() + "' " +
                        (folder / "expected").string() + " " + checksum)
                           .c_str()) == 0;
  };
  Bytes bytes = random_bytes(kOddShape.layer_bytes());
  for (int step = 0; step < 2; ++step) {
    bytes = random_bytes(kOddShape.layer_bytes());
    store.put(4, bytes);
    store.finish_put(4);
    EXPECT_TRUE(agrees(bytes, store.file(), "")) << "after each step, while the store is in use";
  }
  store.flush();
  const auto last = std::to_string(block_checksum(std::span(bytes).subspan(9 * 8192)));
  EXPECT_TRUE(agrees(bytes, store.file(), last));
  std::filesystem::copy_file(store.file(), folder / "kept.h5");
  EXPECT_TRUE(agrees(bytes, folder / "kept.h5", last));
}

TEST(DiskStore, ReservesItsSpaceAtStart) {
  const ScratchFolder folder;
  const ActivationShape shape{{0, 1}, 1000, 1000, ActivationType::kFloat32};
  const DiskActivationStore store(small_options(folder.path(), shape));
  struct stat status {};
  ASSERT_EQ(::stat(store.file().c_str(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, shape.total_bytes())
      << "holes would fill, or not, in the middle of a step";
}

TEST(DiskStore, FullDiskIsFoundAtStart) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  const ActivationShape shape{{0, 1}, 512, 1024, ActivationType::kBfloat16};
  expect_user_error([&] { DiskActivationStore store(small_options(disk.path(), shape)); },
                    {"No space left", "2097152 bytes needed", "bytes free", disk.path().string()});
  EXPECT_EQ(count_files(disk.path()), 0);
  // Where free space is not known beforehand (a quota), the reservation finds it.
  const ActivationShape fits{{0}, 128, 1024, ActivationType::kBfloat16};
  const FileSizeLimit limit(100'000);
  expect_user_error([&] { DiskActivationStore store(small_options(disk.path(), fits)); },
                    {"too large", "bytes needed", "bytes free"});
}

TEST(DiskStore, FullDiskInTheMiddleIsReported) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  const ActivationShape shape{{0, 1}, 100, 1024, ActivationType::kBfloat16};
  DiskActivationStore store(small_options(disk.path(), shape));
  // A disk that lost the reservation: a hole in its place, and another program takes the space.
  const int descriptor = ::open(store.file().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 400'000), 0);
  ::close(descriptor);
  { std::ofstream(disk / "filler") << std::string(2 << 20, 'x'); }
  const Bytes bytes = random_bytes(shape.layer_bytes());
  expect_user_error(
      [&] {
        store.put(0, bytes);
        store.finish_put(0);
      },
      {"No space left", "bytes needed", "activations.h5"});
  Bytes got(bytes.size());
  for (int again = 0; again < 2; ++again) {
    expect_user_error([&] { store.put(1, bytes); }, {"No space left"});
    expect_user_error([&] { store.get(0, got); }, {"No space left"});
    expect_user_error([&] { store.start_fetch(0); }, {"No space left"});
    expect_user_error([&] { store.flush(); }, {"No space left"});
  }
}

TEST(DiskStore, ShortWriteIsReported) {
  const ScratchFolder folder;
  DiskActivationStore store(small_options(folder.path()));
  const Bytes bytes = random_bytes(kOddShape.layer_bytes());
  const FileSizeLimit limit(100'001);  // in the middle of a chunk
  expect_user_error(
      [&] {
        for (const int layer : kOddShape.layers)
          store.put(layer, bytes);
        store.flush();
      },
      {"too large", "activations.h5", "ulimit -f"});
}

TEST(DiskStore, FailingSourceIsReported) {
  const ScratchFolder folder;
  DiskActivationStore store(small_options(folder.path()));
  store.put_from(0, [](int64_t offset, std::span<std::byte>) {
    if (offset == 16384) throw std::runtime_error("the copy failed");
  });
  EXPECT_THROW(store.finish_put(0), std::runtime_error);
  EXPECT_THROW(store.start_fetch(0), std::runtime_error);
}

TEST(DiskStore, EveryFlippedBitIsFound) {
  const ScratchFolder folder;
  const ActivationShape& shape = kOddShape;
  const Bytes bytes = random_bytes(shape.layer_bytes());
  std::mt19937_64 random(std::random_device{}());
  for (const DirectIo direct : {DirectIo::kWherePossible, DirectIo::kNever}) {
    for (const int64_t at : {int64_t{0}, shape.layer_bytes() - 1, int64_t{8191}, int64_t{8192},
                             static_cast<int64_t>(random() % static_cast<uint64_t>(shape.layer_bytes()))}) {
      DiskStoreOptions options = small_options(folder.path());
      options.direct = direct;
      DiskActivationStore store(options);
      for (const int layer : shape.layers)
        store.put(layer, bytes);
      store.flush();
      flip(store, 4, at, static_cast<std::byte>(1 << (random() % 8)));
      Bytes got(bytes.size());
      store.get(6, got);
      EXPECT_TRUE(got == bytes) << "another layer is as it was";
      expect_user_error([&] { store.get(4, got); },
                        {"of layer 4", "checksum differs", "activations.h5", "checkpoint"});
      expect_user_error([&] { store.get(6, got); }, {"checksum differs"});
    }
  }
}

TEST(DiskStore, LostAndExchangedWritesAreFound) {
  const ScratchFolder folder;
  const Bytes first = random_bytes(kOddShape.layer_bytes());
  const Bytes second = random_bytes(kOddShape.layer_bytes());
  DiskActivationStore store(small_options(folder.path()));
  store.put(0, first);
  store.flush();
  std::filesystem::copy_file(store.file(), folder / "before");
  store.put(0, second);
  store.flush();
  // A disk that answers with the step before.
  std::filesystem::copy_file(folder / "before", store.file(),
                             std::filesystem::copy_options::overwrite_existing);
  Bytes got(first.size());
  expect_user_error([&] { store.get(0, got); }, {"checksum differs"});
}

TEST(DiskStore, TruncatedFileIsFound) {
  const ScratchFolder folder;
  const Bytes bytes = random_bytes(kOddShape.layer_bytes());
  for (const int64_t keep : {int64_t{0}, int64_t{50'001}, int64_t{200'000}}) {
    DiskActivationStore store(small_options(folder.path()));
    for (const int layer : kOddShape.layers)
      store.put(layer, bytes);
    store.flush();
    std::filesystem::resize_file(store.file(), static_cast<uintmax_t>(keep));
    Bytes got(bytes.size());
    expect_user_error([&] { store.get(6, got); }, {"ended", "early", "activations.h5"});
  }
}

TEST(DiskStore, KeepsBuffersBounded) {
  const ScratchFolder folder;
  const ActivationShape shape{{0, 1, 2, 3}, 4096, 256, ActivationType::kFloat32};  // 4 MiB a layer
  DiskStoreOptions options = small_options(folder.path(), shape);
  options.buffers = 2;
  DiskActivationStore store(options);
  EXPECT_EQ(store.transfer_memory().size(), 2U * 8192U);
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  for (const int layer : shape.layers) {
    store.put_from(layer, [&inside, &most, layer](int64_t offset, std::span<std::byte> into) {
      const int now = ++inside;
      int seen = most;
      while (now > seen && !most.compare_exchange_weak(seen, now)) {
      }
      std::fill(into.begin(), into.end(), static_cast<std::byte>(offset / 8192 + layer));
      --inside;
    });
  }
  for (const int layer : {3, 2, 1, 0})
    store.start_fetch(layer);  // far more than the buffers hold
  for (const int layer : {3, 2, 1, 0}) {
    store.get_to(layer, [&](int64_t offset, std::span<const std::byte> from) {
      for (const std::byte byte : from)
        ASSERT_EQ(byte, static_cast<std::byte>(offset / 8192 + layer));
    });
  }
  EXPECT_LE(most, 2);
}

TEST(DiskStore, ManyThreadsAndManyStores) {
  const ScratchFolder folder;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      DiskStoreOptions options = small_options(folder.path());
      options.rank = rank;
      options.threads = 8;
      options.buffers = 3;
      DiskActivationStore store(options);
      Bytes got(static_cast<size_t>(kOddShape.layer_bytes()));
      for (int step = 0; step < 10; ++step) {
        std::vector<Bytes> kept(4, Bytes(got.size()));
        for (size_t i = 0; i < 4; ++i) {
          std::fill(kept[i].begin(), kept[i].end(),
                    static_cast<std::byte>(rank + 4 * step + 50 * static_cast<int>(i)));
          store.put(kOddShape.layers[i], kept[i]);
        }
        for (size_t i = 4; i-- > 0;)
          store.start_fetch(kOddShape.layers[i]);
        for (size_t i = 4; i-- > 0;) {
          store.get(kOddShape.layers[i], got);
          EXPECT_TRUE(got == kept[i]) << "rank " << rank << " step " << step;
        }
      }
    });
  }
  for (std::thread& rank : ranks)
    rank.join();
}

TEST(DiskStore, EndsWhileBusy) {
  const ScratchFolder folder;
  const Bytes bytes = random_bytes(kOddShape.layer_bytes());
  for (int round = 0; round < 20; ++round) {
    DiskActivationStore store(small_options(folder.path()));
    store.put(0, bytes);
    store.put(2, bytes);
    store.start_fetch(0);
    store.start_fetch(2);
  }
  EXPECT_EQ(count_files(folder.path()), 0) << "not even the lock of the folder";
}

TEST(BlockChecksum, SeesEveryBitAndEveryLength) {
  Bytes bytes = random_bytes(300);
  for (size_t length = 0; length <= bytes.size(); ++length) {
    const auto part = std::span(bytes).first(length);
    const uint64_t before = block_checksum(part);
    if (length > 0) {
      EXPECT_NE(block_checksum(part.first(length - 1)), before);
    }
    if (length != 64 && length != 299) continue;
    for (size_t bit = 0; bit < 8 * length; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      ASSERT_NE(block_checksum(part), before) << bit;
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    }
    for (size_t word = 8; word + 8 <= length; word += 8) {
      std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + static_cast<std::ptrdiff_t>(word));
      ASSERT_NE(block_checksum(part), before) << "words exchanged";
      std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + static_cast<std::ptrdiff_t>(word));
    }
  }
}

}  // namespace
}  // namespace longhalo
