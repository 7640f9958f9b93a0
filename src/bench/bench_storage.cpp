// `longhalo bench storage`: the activation store on disk against plain files of the same size, written and
// read by as many threads in blocks of the same size, in turns. On every rank at once, as in training.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

#include "app/training_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "bench/timed_runs.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/available_memory.hpp"
#include "storage/checksum.hpp"
#include "storage/disk_activation_store.hpp"
#include "storage/job_scratch.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultBytes = int64_t{2} << 30;
constexpr int64_t kHidden = 2048;
constexpr int kLayers = 8;

// What is stored: random bytes, other ones in each layer.
class Contents {
 public:
  static constexpr int64_t kShift = 4096;  // as direct I/O wants addresses
  explicit Contents(int64_t layer_bytes, uint64_t seed) : bytes_(layer_bytes + kLayers * kShift) {
    std::mt19937_64 generator(seed);
    const std::span<std::byte> all = bytes_.span();
    for (size_t i = 0; i < all.size(); i += sizeof(uint64_t)) {
      const uint64_t word = generator();
      std::memcpy(all.data() + i, &word, std::min(sizeof word, all.size() - i));
    }
  }
  const std::byte* of(int layer, int64_t offset) const {
    return bytes_.span().data() + layer * kShift + offset;
  }

 private:
  AlignedMemory bytes_;
};

// A plain file: threads that take block after block.
class RawFile {
 public:
  RawFile(const std::filesystem::path& path, const DiskStoreOptions& options)
      : path_(path),
        bytes_(options.shape.total_bytes()),
        layer_bytes_(options.shape.layer_bytes()),
        block_(options.chunk_bytes),
        threads_(options.threads),
        buffers_(block_ * threads_) {
    file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    is_direct_ = file_.is_open();
    if (!is_direct_) file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!file_.is_open()) throw_write_error(errno, path, bytes_);
    if (const int error = ::posix_fallocate(file_.get(), 0, bytes_); error != 0)
      throw_write_error(error, path, bytes_);
  }
  bool is_direct() const { return is_direct_; }

  // The same bytes as the store, from where they lie.
  void write(const Contents& contents) {
    run(Order::kFirstLayerFirst, [&](int, int64_t offset, int64_t size) {
      return ::pwrite(file_.get(),
                      contents.of(static_cast<int>(offset / layer_bytes_), offset % layer_bytes_),
                      static_cast<size_t>(size), offset);
    });
  }
  void read() {
    run(Order::kLastLayerFirst, [&](int thread, int64_t offset, int64_t size) {
      return ::pread(file_.get(), buffer(thread).data(), static_cast<size_t>(size), offset);
    });
  }

 private:
  enum class Order { kFirstLayerFirst, kLastLayerFirst };  // as the store writes and reads
  std::span<std::byte> buffer(int thread) const {
    return buffers_.span().subspan(static_cast<size_t>(thread * block_), static_cast<size_t>(block_));
  }
  // `move` moves `size` bytes at `offset` and returns how many it moved.
  template <class Move>
  void run(Order order, const Move& move) {
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    {
      std::vector<std::jthread> workers;
      for (int thread = 0; thread < threads_; ++thread) {
        workers.emplace_back([&, thread] {
          // A layer in blocks, the last of which may be short.
          const int64_t blocks = (layer_bytes_ + block_ - 1) / block_;
          for (int64_t i = next++; i < kLayers * blocks && error == 0; i = next++) {
            const int64_t layer = order == Order::kFirstLayerFirst ? i / blocks : kLayers - 1 - i / blocks;
            const int64_t in_layer = i % blocks * block_;
            const int64_t size = std::min(block_, layer_bytes_ - in_layer);
            if (move(thread, layer * layer_bytes_ + in_layer, size) != size) error = errno == 0 ? EIO : errno;
          }
        });
      }
    }
    if (error != 0) throw_write_error(error, path_, bytes_);
  }

  std::filesystem::path path_;
  int64_t bytes_, layer_bytes_, block_;
  int threads_;
  AlignedMemory buffers_;
  FileDescriptor file_;
  bool is_direct_ = false;
};

void put_all(DiskActivationStore& store, const Contents& contents) {
  for (int layer = 0; layer < kLayers; ++layer)
    store.put_from(layer, [&contents, layer](int64_t offset, std::span<std::byte> into) {
      std::memcpy(into.data(), contents.of(layer, offset), into.size());
    });
  for (int layer = 0; layer < kLayers; ++layer)
    store.finish_put(layer);
}

void get_all(DiskActivationStore& store, std::span<std::byte> into) {
  for (int layer = kLayers; layer-- > 0;)
    store.start_fetch(layer);
  for (int layer = kLayers; layer-- > 0;)
    store.get(layer, into);
}

int64_t wrong_bytes(DiskActivationStore& store, const Contents& contents) {
  int64_t wrong = 0;
  for (int layer = 0; layer < kLayers; ++layer)
    store.get_to(layer, [&](int64_t offset, std::span<const std::byte> from) {
      if (std::memcmp(from.data(), contents.of(layer, offset), from.size()) == 0) return;
      for (size_t i = 0; i < from.size(); ++i)
        wrong += from[i] == contents.of(layer, offset)[i] ? 0 : 1;
    });
  return wrong;
}

double checksum_seconds(std::span<const std::byte> bytes) {
  uint64_t sum = block_checksum(bytes);
  const Stopwatch watch;
  sum ^= block_checksum(bytes);
  const double seconds = watch.seconds();
  check(sum == 0, "the same bytes have the same checksum");
  return seconds;
}

enum Kind { kRawWrite, kStoreWrite, kRawRead, kStoreRead, kKinds };

struct Measured {
  std::array<std::vector<double>, kKinds> seconds;  // of each turn, slowest rank
  int64_t wrong_bytes = 0;
  bool is_direct = true;
};

// One turn: a plain file and a store, both new, since where a disk puts a file decides how fast it is. They
// are written once before the clock runs, as the first write of reserved blocks costs more than those of
// later steps.
void take_turn(const MpiSession& session, const DiskStoreOptions& options, const Contents& contents,
               std::span<std::byte> into, bool raw_first, Measured& measured) {
  std::unique_ptr<JobScratch> scratch;
  std::unique_ptr<RawFile> raw;
  std::unique_ptr<DiskActivationStore> store;
  const auto make_raw = [&] { raw = std::make_unique<RawFile>(scratch->path() / "raw", options); };
  session.together([&] {
    scratch = std::make_unique<JobScratch>(options.directory, options.job, session.rank());
    if (raw_first) make_raw();
    store = std::make_unique<DiskActivationStore>(options);
    if (!raw_first) make_raw();
    raw->write(contents);
    put_all(*store, contents);
  });
  for (int kind = 0; kind < kKinds; ++kind) {
    wait_for_all(session);
    const Stopwatch watch;
    session.together([&] {
      if (kind == kRawWrite) raw->write(contents);
      if (kind == kStoreWrite) put_all(*store, contents);
      if (kind == kRawRead) raw->read();
      if (kind == kStoreRead) get_all(*store, into);
    });
    measured.seconds[static_cast<size_t>(kind)].push_back(spread_over_ranks(session, watch.seconds()).max);
  }
  session.together([&] { measured.wrong_bytes += wrong_bytes(*store, contents); });
  measured.is_direct = measured.is_direct && store->is_direct() && raw->is_direct();
}

// Of the plain file's rate in the same turn, median.
double share(const Measured& measured, Kind raw, Kind store) {
  std::vector<double> ratios;
  for (size_t i = 0; i < measured.seconds[raw].size(); ++i)
    ratios.push_back(measured.seconds[raw][i] / measured.seconds[store][i]);
  std::sort(ratios.begin(), ratios.end());
  return ratios[ratios.size() / 2];
}

int64_t bench_bytes(const Config& config) {
  return config.bench.bytes > 0 ? config.bench.bytes : kDefaultBytes;
}

DiskStoreOptions options_of(const MpiSession& session, const Config& config) {
  const int64_t rows = std::max<int64_t>(1, bench_bytes(config) / kLayers / (2 * kHidden));
  DiskStoreOptions options;
  options.directory = activations_directory(config);
  options.job = job_name();
  options.rank = session.rank();
  options.shape = {{}, rows, kHidden, ActivationType::kBfloat16};
  for (int layer = 0; layer < kLayers; ++layer)
    options.shape.layers.push_back(layer);
  const DiskBuffers buffers = disk_buffers(options.shape.layer_bytes());
  options.chunk_bytes = std::min(buffers.chunk_bytes, (options.shape.layer_bytes() + 4095) / 4096 * 4096);
  options.buffers = buffers.count;
  options.threads = buffers.threads;
  return options;
}

// A layer's contents and the memory that it is read back to; buffers of the store and of the plain file.
int64_t memory_of(const DiskStoreOptions& options) {
  return 2 * options.shape.layer_bytes() + kLayers * Contents::kShift +
         options.chunk_bytes * (options.buffers + options.threads);
}

}  // namespace

void run_bench_storage(const MpiSession& session, const Config& config) {
  const DiskStoreOptions options = options_of(session, config);
  const int64_t bytes = options.shape.total_bytes();
  session.together([&] {
    require_host_memory(memory_of(options), session.local_ranks(),
                        text("bench.bytes ", bench_bytes(config), " (--bytes)"));
  });
  const Contents contents(options.shape.layer_bytes(), static_cast<uint64_t>(session.rank()) + 1);
  const AlignedMemory into(options.shape.layer_bytes());
  Measured measured;
  for (int64_t repeat = 0; repeat < config.bench.repeats; ++repeat)
    take_turn(session, options, contents, into.span(), repeat % 2 == 0, measured);

  const double all_bytes = static_cast<double>(bytes) * session.ranks();
  BenchReport report("activation store on disk");
  report.add("ranks", session.ranks(), "", "each stores at the same time");
  report.add("directory", options.directory.string());
  report.add("bytes", bytes, "B", text("a rank, in ", kLayers, " layers"));
  report.add("chunk_bytes", options.chunk_bytes, "B", "block of the plain file, too");
  report.add("threads", options.threads, "", "of the store, and of the plain file");
  report.add("buffers", options.buffers, "", "of the store, of a chunk each");
  report.add("direct_io", measured.is_direct, "", "past the page cache, both");
  report.add("repeats", config.bench.repeats, "", "turns, each with new files; medians, slowest rank");
  BenchTable table({{"what", ""}, {"median_seconds", "s"}, {"min_seconds", "s"}, {"gb_per_second", "GB/s"}});
  constexpr const char* kNames[] = {"plain file, write", "store, checksum and write", "plain file, read",
                                    "store, read and verify"};
  for (int kind = 0; kind < kKinds; ++kind) {
    const TimedRuns time = summary_of(measured.seconds[static_cast<size_t>(kind)]);
    table.add({kNames[kind], time.median_seconds, time.min_seconds, all_bytes / time.median_seconds / 1e9});
  }
  report.add_table("rates", table, "all ranks together");
  report.add("store_write_share", share(measured, kRawWrite, kStoreWrite), "",
             "of the plain file's rate in the same turn, median");
  report.add("store_read_share", share(measured, kRawRead, kStoreRead), "", "the same");
  const double checksum = spread_over_ranks(session, checksum_seconds(into.span())).max;
  report.add("checksum_gb_per_second", static_cast<double>(into.span().size()) / checksum / 1e9, "GB/s",
             "one thread, bytes in memory");
  const int64_t wrong = sum_over_ranks(session, measured.wrong_bytes);
  report.add("wrong_bytes", wrong, "B", "read back and compared after every turn");
  report.publish(session, config.bench.json);
  session.together([&] { check(wrong == 0, "the store gives back what was put"); });
}

}  // namespace longhalo
