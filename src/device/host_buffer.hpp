// Host memory for arrays: 64-byte aligned, uninitialised, counted, moved but not copied.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "core/error.hpp"

namespace longhalo {

namespace detail {
/// Throws UserError with the bytes asked for when the system has no memory left. `purpose` names the array.
void* allocate_host(int64_t bytes, const char* purpose);
void release_host(void* data, int64_t bytes) noexcept;
}  // namespace detail

template <class T>
class HostBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  HostBuffer() = default;
  explicit HostBuffer(int64_t count, const char* purpose = "an array")
      : data_(static_cast<T*>(detail::allocate_host(count * static_cast<int64_t>(sizeof(T)), purpose))),
        size_(count) {}
  ~HostBuffer() { detail::release_host(data_, size_ * static_cast<int64_t>(sizeof(T))); }
  HostBuffer(HostBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  std::span<T> span() { return {data_, static_cast<size_t>(size_)}; }
  std::span<const T> span() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace longhalo
