// Where the inputs x [n, D] of checkpointed layers wait between the forward pass and the backward pass: on a
// node-local disk (DiskActivationStore) or in host memory (HostActivationStore), behind one interface.
// One thread drives a store. A fault met behind its back (full disk, damaged bytes) is thrown as UserError by
// the next call and by every one after it; bytes that are not those that were put are never handed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <vector>

namespace longhalo {

enum class ActivationType { kBfloat16, kFloat32 };
std::string_view activation_type_name(ActivationType type);
int64_t activation_type_bytes(ActivationType type);

/// What is kept: x [tokens, hidden] of each of these layers. A rank may own no tokens.
struct ActivationShape {
  std::vector<int> layers;
  int64_t tokens = 0;
  int64_t hidden = 0;
  ActivationType type = ActivationType::kBfloat16;

  int64_t layer_bytes() const { return tokens * hidden * activation_type_bytes(type); }
  int64_t total_bytes() const { return layer_bytes() * static_cast<int64_t>(layers.size()); }
  /// Where `layer` stands in `layers`. Throws InvariantError if it does not.
  int slot_of(int layer) const;
};

/// Since the store was made. Seconds are wall-clock time.
struct StoreFigures {
  int64_t bytes_put = 0;        // stored and done with
  int64_t bytes_fetched = 0;    // read and verified
  double write_seconds = 0;     // while at least one chunk was being written
  double read_seconds = 0;      // while at least one chunk was being read
  double put_wait_seconds = 0;  // for which the caller of put was kept from going on
  double get_wait_seconds = 0;  // for which the caller of get waited for bytes to arrive
};

class ActivationStore {
 public:
  /// Fills `into` with the layer's bytes from `offset`; called once for each chunk, on threads of the store,
  /// several at a time.
  using Source = std::function<void(int64_t offset, std::span<std::byte> into)>;
  /// Takes the layer's bytes from `offset`; called in order of offset on the caller's thread. `from` is valid
  /// until it returns. It may call start_fetch(), nothing else of the store.
  using Sink = std::function<void(int64_t offset, std::span<const std::byte> from)>;

  virtual ~ActivationStore() = default;

  /// Keeps the bytes of a layer, in place of those put before. Returns when all are copied; waits for a free
  /// buffer where the disk is slower than the caller.
  virtual void put(int layer, std::span<const std::byte> bytes) = 0;
  /// The same without a copy by the caller: returns at once. `source` is called until finish_put(layer)
  /// returns.
  virtual void put_from(int layer, Source source) = 0;
  /// Waits until the source of the last put_from() is no longer needed and the layer is stored.
  virtual void finish_put(int layer) = 0;

  /// Begins to bring a layer back, after those asked for before. Layers are to be taken in the order in which
  /// they were asked for; taking another one first is right but wastes what was read ahead.
  virtual void start_fetch(int layer) = 0;
  /// The bytes of a layer that was put; start_fetch() is implied. May be repeated.
  virtual void get(int layer, std::span<std::byte> bytes) = 0;
  virtual void get_to(int layer, const Sink& sink) = 0;

  virtual StoreFigures figures() const = 0;
  /// The memory that sources write to and sinks read from, for a caller who wants it page-locked.
  virtual std::span<std::byte> transfer_memory() = 0;
};

/// Memory at a multiple of 4096 bytes, uninitialised, so that untouched pages cost nothing.
class AlignedMemory {
 public:
  static constexpr size_t kAlignment = 4096;
  explicit AlignedMemory(int64_t bytes)
      : data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment)))),
        bytes_(static_cast<size_t>(bytes)) {}
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  struct Release {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<std::byte, Release> data_;
  size_t bytes_;
};

/// Keeps everything in host memory, allocated when made: shape.total_bytes().
class HostActivationStore : public ActivationStore {
 public:
  /// Throws std::bad_alloc if there is no such memory.
  explicit HostActivationStore(ActivationShape shape);

  void put(int layer, std::span<const std::byte> bytes) override;
  void put_from(int layer, Source source) override;  // calls `source` once, on this thread
  void finish_put(int layer) override;
  void start_fetch(int layer) override;
  void get(int layer, std::span<std::byte> bytes) override;
  void get_to(int layer, const Sink& sink) override;
  StoreFigures figures() const override { return figures_; }
  std::span<std::byte> transfer_memory() override { return memory_.span(); }

 private:
  std::span<std::byte> place_of(int layer);
  std::span<const std::byte> stored(int layer);

  ActivationShape shape_;
  AlignedMemory memory_;
  std::vector<bool> is_put_;
  StoreFigures figures_;
};

}  // namespace longhalo
