// An array in device memory: uninitialised, moved but not copied. Allocated and released in the order of one
// stream, from the device's pool; another stream that uses it must be ordered against that one by events.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/memory_pool.hpp"

namespace longhalo {

template <class T>
class DeviceBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceBuffer() = default;
  /// Throws UserError naming `purpose` when the card has no memory left.
  DeviceBuffer(int64_t count, const char* purpose, cudaStream_t stream)
      : data_(static_cast<T*>(
            memory_pool().allocate(count * static_cast<int64_t>(sizeof(T)), purpose, stream))),
        size_(count),
        stream_(stream) {}
  ~DeviceBuffer() {
    if (data_ != nullptr) memory_pool().release(data_, stream_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        stream_(other.stream_) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }
  bool empty() const { return size_ == 0; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
  cudaStream_t stream_ = nullptr;
};

/// Copies between arrays of equal type, ordered on `stream`; the host does not wait, so host memory must be
/// pinned to fly beside compute and must live until the copy is done.
template <class T>
void copy_async(T* to, const T* from, int64_t count, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T), cudaMemcpyDefault, stream),
             "copying between arrays");
}

/// A device array with the values of a host array; the host waits.
template <class T>
DeviceBuffer<T> to_device(std::span<const T> values, const char* purpose, cudaStream_t stream) {
  DeviceBuffer<T> buffer(static_cast<int64_t>(values.size()), purpose, stream);
  copy_async(buffer.data(), values.data(), buffer.size(), stream);
  wait_for_stream(stream, "a copy to this rank's GPU");
  return buffer;
}

/// Copies `values.size()` elements from device memory; the host waits.
template <class T>
void to_host(std::span<T> values, const T* from, cudaStream_t stream) {
  copy_async(values.data(), from, static_cast<int64_t>(values.size()), stream);
  wait_for_stream(stream, "a copy from this rank's GPU");
}

}  // namespace longhalo
