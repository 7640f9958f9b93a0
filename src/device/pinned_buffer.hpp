// Page-locked host memory: copies to and from the device run beside compute. Scarce, so small and reused.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "core/error.hpp"
#include "core/text.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {

template <class T>
class PinnedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  PinnedBuffer() = default;
  /// Throws UserError naming `purpose` when the host can lock no more memory.
  PinnedBuffer(int64_t count, const char* purpose) : size_(count) {
    check(count >= 0, "an array size is not negative");
    if (count == 0) return;
    void* data = nullptr;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const cudaError_t code = cudaMallocHost(&data, bytes);
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw UserError(text("the host could not lock ", bytes / 1'000'000, " MB for ", purpose),
                      "cudaMallocHost",
                      "raise the limit of locked memory (ulimit -l) or of the job's memory");
    }
    check_cuda(code, "cudaMallocHost");
    data_ = static_cast<T*>(data);
  }
  ~PinnedBuffer() {
    if (data_ != nullptr) log_cuda_failure(cudaFreeHost(data_), "releasing locked host memory");
  }
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  std::span<T> span() { return {data_, static_cast<size_t>(size_)}; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace longhalo
