#include "storage/disk_activation_store.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/checksum.hpp"

namespace longhalo {
namespace {

DiskStoreOptions checked(DiskStoreOptions options) {
  check(options.buffers >= 2 && options.threads >= 1, "a store has two buffers and a thread at least");
  check(options.chunk_bytes > 0 && options.chunk_bytes % ActivationFile::kBlockBytes == 0,
        "a chunk is a multiple of 4096 bytes");
  // A small layer needs no large buffers.
  const int64_t blocks =
      (options.shape.layer_bytes() + ActivationFile::kBlockBytes - 1) / ActivationFile::kBlockBytes;
  options.chunk_bytes =
      std::min(options.chunk_bytes, std::max<int64_t>(blocks, 1) * ActivationFile::kBlockBytes);
  return options;
}

}  // namespace

void DiskActivationStore::Busy::begin() {
  if (running++ == 0) since.restart();
}
void DiskActivationStore::Busy::end() {
  if (--running == 0) seconds += since.seconds();
}
double DiskActivationStore::Busy::now() const {
  return seconds + (running > 0 ? since.seconds() : 0);
}

DiskActivationStore::DiskActivationStore(DiskStoreOptions options)
    : options_(checked(std::move(options))),
      scratch_(options_.directory, options_.job, options_.rank),
      file_(scratch_.path() / "activations.h5", options_.shape, options_.chunk_bytes, options_.direct),
      memory_(options_.chunk_bytes * options_.buffers),
      chunks_((options_.shape.layer_bytes() + options_.chunk_bytes - 1) / options_.chunk_bytes),
      layers_(options_.shape.layers.size()) {
  for (Layer& layer : layers_)
    layer.checksums.resize(static_cast<size_t>(chunks_));
  for (int index = options_.buffers - 1; index >= 0; --index)
    free_.push_back(index);
  try {
    for (int i = 0; i < options_.threads; ++i)
      threads_.emplace_back([this] { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

DiskActivationStore::~DiskActivationStore() {
  stop();
}

void DiskActivationStore::stop() {
  {
    const Lock lock(mutex_);
    is_stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_)
    thread.join();
}

int64_t DiskActivationStore::chunk_size(int64_t chunk) const {
  return std::min(options_.chunk_bytes, options_.shape.layer_bytes() - chunk * options_.chunk_bytes);
}

std::span<std::byte> DiskActivationStore::buffer(int index, int64_t bytes) const {
  return memory_.span().subspan(static_cast<size_t>(index * options_.chunk_bytes),
                                static_cast<size_t>(bytes));
}

// ---- the caller's side ----

void DiskActivationStore::rethrow(const Lock&) const {
  if (error_) std::rethrow_exception(error_);
}

template <class Condition>
void DiskActivationStore::wait(Lock& lock, const Condition& condition, double& seconds) {
  rethrow(lock);
  if (condition()) return;
  const Stopwatch clock;
  done_.wait(lock, [&] { return error_ != nullptr || condition(); });
  seconds += clock.seconds();
  rethrow(lock);
}

void DiskActivationStore::begin_put(Lock& lock, int slot) {
  Layer& layer = layers_[static_cast<size_t>(slot)];
  // Two writes of one chunk must not be under way together: the older could come last.
  wait(
      lock, [&] { return layer.writes_pending == 0; }, figures_.put_wait_seconds);
  drop_fetches(lock, slot);
  layer.is_put = false;
}

void DiskActivationStore::put(int layer, std::span<const std::byte> bytes) {
  const int slot = options_.shape.slot_of(layer);
  check(static_cast<int64_t>(bytes.size()) == options_.shape.layer_bytes(), "a layer is put as a whole");
  Lock lock(mutex_);
  begin_put(lock, slot);
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    wait(
        lock, [&] { return !free_.empty(); }, figures_.put_wait_seconds);
    const int index = free_.back();
    free_.pop_back();
    lock.unlock();
    const std::span<std::byte> into = buffer(index, chunk_size(chunk));
    std::memcpy(into.data(), bytes.data() + chunk * options_.chunk_bytes, into.size());
    lock.lock();
    ++layers_[static_cast<size_t>(slot)].writes_pending;
    writes_.push_back({slot, chunk, index, nullptr});
    work_.notify_one();
  }
  layers_[static_cast<size_t>(slot)].is_put = true;
}

void DiskActivationStore::put_from(int layer, Source source) {
  const int slot = options_.shape.slot_of(layer);
  Lock lock(mutex_);
  begin_put(lock, slot);
  const auto shared = std::make_shared<Source>(std::move(source));
  for (int64_t chunk = 0; chunk < chunks_; ++chunk)
    writes_.push_back({slot, chunk, kNoBuffer, shared});
  layers_[static_cast<size_t>(slot)].writes_pending = chunks_;
  layers_[static_cast<size_t>(slot)].is_put = true;
  work_.notify_all();
}

void DiskActivationStore::finish_put(int layer) {
  const Layer& state = layers_[static_cast<size_t>(options_.shape.slot_of(layer))];
  Lock lock(mutex_);
  // NOTE: a failed store waits too, until no thread is inside a source any more.
  const Stopwatch clock;
  done_.wait(lock, [&] { return state.writes_pending == 0; });
  figures_.put_wait_seconds += clock.seconds();
  rethrow(lock);
}

void DiskActivationStore::start_fetch(int layer) {
  Lock lock(mutex_);
  rethrow(lock);
  fetch_of(lock, options_.shape.slot_of(layer));
}

std::shared_ptr<DiskActivationStore::Fetch> DiskActivationStore::fetch_of(const Lock&, int slot) {
  check(layers_[static_cast<size_t>(slot)].is_put,
        text("layer ", options_.shape.layers[static_cast<size_t>(slot)], " was put before it is read"));
  for (const std::shared_ptr<Fetch>& fetch : fetches_) {
    if (fetch->slot == slot) return fetch;
  }
  auto fetch = std::make_shared<Fetch>();
  fetch->slot = slot;
  fetch->buffers.assign(static_cast<size_t>(chunks_), kNoBuffer);
  fetches_.push_back(fetch);
  work_.notify_all();
  return fetch;
}

void DiskActivationStore::free_buffer(const Lock&, int index) {
  free_.push_back(index);
  work_.notify_all();
  done_.notify_all();
}

// Ends the fetch of a layer, if there is one.
void DiskActivationStore::drop_fetches(const Lock& lock, int slot) {
  for (auto it = fetches_.begin(); it != fetches_.end();) {
    Fetch& fetch = **it;
    if (fetch.slot != slot) {
      ++it;
      continue;
    }
    fetch.is_dropped = true;
    for (int& index : fetch.buffers) {
      if (index == kNoBuffer) continue;
      --read_buffers_;
      free_buffer(lock, std::exchange(index, kNoBuffer));
    }
    it = fetches_.erase(it);
  }
}

void DiskActivationStore::get(int layer, std::span<std::byte> bytes) {
  check(static_cast<int64_t>(bytes.size()) == options_.shape.layer_bytes(), "a layer is taken as a whole");
  get_to(layer, [&](int64_t offset, std::span<const std::byte> from) {
    std::memcpy(bytes.data() + offset, from.data(), from.size());
  });
}

void DiskActivationStore::get_to(int layer, const Sink& sink) {
  const int slot = options_.shape.slot_of(layer);
  Lock lock(mutex_);
  rethrow(lock);
  const std::shared_ptr<Fetch> fetch = fetch_of(lock, slot);
  // Those asked for before this one hold buffers that nobody takes now.
  while (fetches_.front() != fetch)
    drop_fetches(lock, fetches_.front()->slot);
  take(lock, fetch, sink);
}

void DiskActivationStore::take(Lock& lock, const std::shared_ptr<Fetch>& fetch, const Sink& sink) {
  try {
    for (int64_t& chunk = fetch->next_taken; chunk < chunks_; ++chunk) {
      int& arrived = fetch->buffers[static_cast<size_t>(chunk)];
      wait(
          lock, [&] { return arrived != kNoBuffer; }, figures_.get_wait_seconds);
      const int index = arrived;
      lock.unlock();
      sink(chunk * options_.chunk_bytes, buffer(index, chunk_size(chunk)));
      lock.lock();
      arrived = kNoBuffer;
      --read_buffers_;
      free_buffer(lock, index);
    }
  } catch (...) {  // the sink's own exception, or the store's error
    if (!lock.owns_lock()) lock.lock();
    drop_fetches(lock, fetch->slot);
    throw;
  }
  fetches_.remove(fetch);
  work_.notify_all();
}

void DiskActivationStore::flush() {
  Lock lock(mutex_);
  wait(
      lock,
      [&] {
        return std::all_of(layers_.begin(), layers_.end(),
                           [](const Layer& layer) { return layer.writes_pending == 0; });
      },
      figures_.put_wait_seconds);
  for (size_t slot = 0; slot < layers_.size(); ++slot)
    file_.write_checksums(static_cast<int>(slot), layers_[slot].checksums);
}

StoreFigures DiskActivationStore::figures() const {
  const Lock lock(mutex_);
  StoreFigures figures = figures_;
  figures.write_seconds = writing_.now();
  figures.read_seconds = reading_.now();
  return figures;
}

// ---- the threads' side ----

void DiskActivationStore::work() {
  Lock lock(mutex_);
  while (!is_stopping_) {
    if (const std::optional<Write> write = next_write(lock)) {
      run(lock, *write);
    } else if (const std::optional<Read> read = next_read(lock)) {
      run(lock, *read);
    } else {
      work_.wait(lock);
    }
  }
}

std::optional<DiskActivationStore::Write> DiskActivationStore::next_write(const Lock&) {
  if (writes_.empty()) return std::nullopt;
  Write write = writes_.front();
  if (write.buffer == kNoBuffer && !error_) {
    if (free_.empty()) return std::nullopt;
    write.buffer = free_.back();
    free_.pop_back();
  }
  writes_.pop_front();
  return write;
}

std::optional<DiskActivationStore::Read> DiskActivationStore::next_read(const Lock&) {
  if (error_ || free_.empty() || read_buffers_ >= options_.buffers - 1) return std::nullopt;
  for (const std::shared_ptr<Fetch>& fetch : fetches_) {
    if (fetch->next_read == chunks_) continue;
    // Its writes come first; those after it wait as well, or they would take the buffers it will need.
    if (layers_[static_cast<size_t>(fetch->slot)].writes_pending > 0) return std::nullopt;
    const Read read{fetch, fetch->next_read++, free_.back()};
    free_.pop_back();
    ++read_buffers_;
    return read;
  }
  return std::nullopt;
}

void DiskActivationStore::run(Lock& lock, const Write& write) {
  const bool is_lost = error_ != nullptr;  // after a failure nothing more is written
  uint64_t checksum = 0;
  std::exception_ptr error;
  if (!is_lost) {
    writing_.begin();
    lock.unlock();
    const std::span<std::byte> bytes = buffer(write.buffer, chunk_size(write.chunk));
    const int64_t offset = write.chunk * options_.chunk_bytes;
    try {
      if (write.source) (*write.source)(offset, bytes);
      checksum = block_checksum(bytes);
      file_.write(write.slot, offset, bytes);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    writing_.end();
  }
  if (error && !error_) error_ = error;
  Layer& layer = layers_[static_cast<size_t>(write.slot)];
  if (!is_lost && !error) {
    layer.checksums[static_cast<size_t>(write.chunk)] = checksum;
    figures_.bytes_put += chunk_size(write.chunk);
  }
  --layer.writes_pending;
  if (write.buffer != kNoBuffer) free_.push_back(write.buffer);
  work_.notify_all();
  done_.notify_all();
}

void DiskActivationStore::run(Lock& lock, const Read& read) {
  Fetch& fetch = *read.fetch;
  const int64_t size = chunk_size(read.chunk);
  const int64_t offset = read.chunk * options_.chunk_bytes;
  const uint64_t expected =
      layers_[static_cast<size_t>(fetch.slot)].checksums[static_cast<size_t>(read.chunk)];
  reading_.begin();
  lock.unlock();
  std::exception_ptr error;
  try {
    const std::span<std::byte> bytes = buffer(read.buffer, size);
    file_.read(fetch.slot, offset, bytes);
    if (block_checksum(bytes) != expected) {
      throw UserError(
          text("bytes ", offset, " to ", offset + size, " of layer ",
               options_.shape.layers[static_cast<size_t>(fetch.slot)],
               " are not those that were written: their checksum differs"),
          file_.path().string(),
          "the scratch disk is damaged or another program wrote to the file; start again from the last "
          "checkpoint, on another disk if it happens again");
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  reading_.end();
  if (error || fetch.is_dropped) {
    // A fetch that was dropped because its layer is rewritten may have read a mixture: no fault.
    if (error && !fetch.is_dropped && !error_) error_ = error;
    --read_buffers_;
    free_.push_back(read.buffer);
  } else {
    fetch.buffers[static_cast<size_t>(read.chunk)] = read.buffer;
    figures_.bytes_fetched += size;
  }
  work_.notify_all();
  done_.notify_all();
}

}  // namespace longhalo
