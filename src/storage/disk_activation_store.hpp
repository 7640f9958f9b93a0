// The activation store on a node-local disk: chunks pass through a bounded number of buffers, which threads
// of the store write to, and read from, one preallocated HDF5 file (activation_file.hpp) while the caller
// computes. A checksum of every chunk is kept in memory and compared when the chunk comes back.
//
//   put: caller copies into a buffer -> thread: checksum, write -> buffer free
//   put_from: thread: source fills a buffer, checksum, write -> buffer free
//   fetch: thread: read into a buffer, compare checksum -> get: caller copies out -> buffer free
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "storage/activation_file.hpp"
#include "storage/activation_store.hpp"
#include "storage/job_scratch.hpp"

namespace longhalo {

struct DiskStoreOptions {
  std::filesystem::path directory;  // node-local scratch; a folder of this process is made in it
  std::string job = "job";          // the batch system's id of the job
  int rank = 0;
  ActivationShape shape;
  int64_t chunk_bytes = int64_t{8} << 20;  // a multiple of 4096
  int buffers = 16;                        // of chunk_bytes each; at least 2
  int threads = 4;
  DirectIo direct = DirectIo::kWherePossible;
};

class DiskActivationStore : public ActivationStore {
 public:
  /// Removes what dead jobs left in the directory and reserves the whole file. Throws UserError, for a full
  /// disk with path, bytes needed and bytes free.
  explicit DiskActivationStore(DiskStoreOptions options);
  /// Drops what was not written yet and removes the folder.
  ~DiskActivationStore() override;
  DiskActivationStore(const DiskActivationStore&) = delete;
  DiskActivationStore& operator=(const DiskActivationStore&) = delete;

  void put(int layer, std::span<const std::byte> bytes) override;
  void put_from(int layer, Source source) override;
  void finish_put(int layer) override;
  void start_fetch(int layer) override;
  void get(int layer, std::span<std::byte> bytes) override;
  void get_to(int layer, const Sink& sink) override;
  StoreFigures figures() const override;
  std::span<std::byte> transfer_memory() override { return memory_.span(); }

  /// Waits until all is written, and writes the checksums into the file for other readers.
  void flush();

  const std::filesystem::path& file() const { return file_.path(); }
  bool is_direct() const { return file_.is_direct(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int kNoBuffer = -1;

  struct Write {
    int slot;
    int64_t chunk;
    int buffer;                      // kNoBuffer: taken when the source is called
    std::shared_ptr<Source> source;  // null: the buffer is filled
  };
  struct Fetch {
    int slot;
    int64_t next_read = 0;     // chunks before it were given to a thread
    int64_t next_taken = 0;    // chunks before it were handed to the caller
    bool is_dropped = false;   // buffers that still arrive are freed at once
    std::vector<int> buffers;  // of each chunk that is read and not taken
  };
  struct Read {
    std::shared_ptr<Fetch> fetch;
    int64_t chunk;
    int buffer;
  };
  struct Layer {
    int64_t writes_pending = 0;
    bool is_put = false;
    std::vector<uint64_t> checksums;
  };
  // Time during which at least one transfer of a kind was under way.
  struct Busy {
    int running = 0;
    double seconds = 0;
    Stopwatch since;
    void begin();
    void end();
    double now() const;
  };

  int64_t chunk_size(int64_t chunk) const;
  std::span<std::byte> buffer(int index, int64_t bytes) const;
  void rethrow(const Lock& lock) const;
  template <class Condition>
  void wait(Lock& lock, const Condition& condition, double& seconds);
  void begin_put(Lock& lock, int slot);
  void free_buffer(const Lock& lock, int index);
  void drop_fetches(const Lock& lock, int slot);
  std::shared_ptr<Fetch> fetch_of(const Lock& lock, int slot);
  void take(Lock& lock, const std::shared_ptr<Fetch>& fetch, const Sink& sink);

  void work();
  std::optional<Write> next_write(const Lock& lock);
  std::optional<Read> next_read(const Lock& lock);
  void run(Lock& lock, const Write& write);
  void run(Lock& lock, const Read& read);
  void stop();

  DiskStoreOptions options_;
  JobScratch scratch_;
  ActivationFile file_;
  AlignedMemory memory_;
  int64_t chunks_;

  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the threads: there is something to do
  std::condition_variable done_;  // for the caller: something is done, or failed
  bool is_stopping_ = false;
  std::exception_ptr error_;
  std::vector<int> free_;
  int read_buffers_ = 0;  // buffers that fetches hold; one is always left to writes
  std::deque<Write> writes_;
  std::list<std::shared_ptr<Fetch>> fetches_;
  std::vector<Layer> layers_;
  StoreFigures figures_;
  Busy writing_, reading_;
  std::vector<std::thread> threads_;
};

}  // namespace longhalo
