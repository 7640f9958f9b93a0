// Device memory from one cudaMemPool a device: allocation and release are ordered on a stream, cost no
// synchronisation, and what is released stays with the process for the next layer or document.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace longhalo {

struct PoolUse {
  int64_t used_bytes = 0, used_high_bytes = 0;          // by arrays, now and at most
  int64_t reserved_bytes = 0, reserved_high_bytes = 0;  // taken from the card, now and at most
  /// Share of the memory taken from the card at most that arrays never filled at once: rounding and holes.
  double fragmentation() const;
  std::string describe() const;
};

class MemoryPool {
 public:
  explicit MemoryPool(int device);

  /// Throws UserError naming `purpose` and the bytes when the card has no memory left.
  void* allocate(int64_t bytes, const char* purpose, cudaStream_t stream);
  void release(void* data, cudaStream_t stream) noexcept;
  PoolUse use() const;
  void reset_high_marks();
  /// Gives what is not used back to the card.
  void trim();

 private:
  int device_;
  cudaMemPool_t pool_ = nullptr;
};

/// The pool of the device that is current in this thread; lives as long as the process.
MemoryPool& memory_pool();

}  // namespace longhalo
