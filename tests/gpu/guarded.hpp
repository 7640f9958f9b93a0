// Arrays for the tests of GPU kernels: results lie between guard zones and are poisoned before each run,
// inputs are random numbers that bf16 holds exactly, so that a kernel and its fp64 reference see the same
// ones.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "core/bfloat16.hpp"
#include "device/device_buffer.hpp"

namespace longhalo::testing {

inline constexpr double kFp32Unit = 0x1p-24;  // half a unit in the last place, relative
inline constexpr double kBf16Unit = 0x1p-8;
inline constexpr double kE4M3Unit = 0x1p-4;
inline constexpr double kE4M3Least = 0x1p-10;  // half the distance of the numbers below 2^-6

/// All bytes start as 0xff, which is NaN in fp32, bf16 and e4m3, and -1 as an integer.
template <class T>
class Guarded {
 public:
  Guarded(int64_t count, cudaStream_t stream)
      : count_(count), stream_(stream), all_(count + 2 * kGuard, "a guarded array", stream) {
    poison();
  }
  T* data() { return all_.data() + kGuard; }
  void poison() {
    check_cuda(cudaMemsetAsync(all_.data(), 0xff, static_cast<size_t>(all_.bytes()), stream_), "poisoning");
  }
  void put(std::span<const T> values) {
    check_cuda(cudaMemcpyAsync(data(), values.data(), values.size_bytes(), cudaMemcpyDefault, stream_),
               "filling");
    check_cuda(cudaStreamSynchronize(stream_), "filling");
  }
  /// Waits, and fails the test when something was written beside the array.
  std::vector<T> values() {
    std::vector<T> host(static_cast<size_t>(all_.size()));
    to_host<T>(host, all_.data(), stream_);
    const auto* bytes = reinterpret_cast<const unsigned char*>(host.data());
    const auto guard = static_cast<size_t>(kGuard) * sizeof(T), total = host.size() * sizeof(T);
    const auto untouched = [](unsigned char byte) { return byte == 0xff; };
    EXPECT_TRUE(std::all_of(bytes, bytes + guard, untouched)) << "written before the array";
    EXPECT_TRUE(std::all_of(bytes + total - guard, bytes + total, untouched)) << "written behind the array";
    return {host.begin() + kGuard, host.end() - kGuard};
  }

 private:
  static constexpr int64_t kGuard = 512 / static_cast<int64_t>(sizeof(T));
  int64_t count_;
  cudaStream_t stream_;
  DeviceBuffer<T> all_;
};

/// Two runs of the same work give the same bits.
template <class T>
void expect_same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) << "bits differ";
}

inline std::vector<float> normal_floats(int64_t count, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, size);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x)
    value = distribution(random);
  return x;
}

inline std::vector<BFloat16> normal_bf16(int64_t count, unsigned seed, float size = 1) {
  std::vector<BFloat16> x;
  x.reserve(static_cast<size_t>(count));
  for (float value : normal_floats(count, seed, size))
    x.push_back(to_bfloat16(value));
  return x;
}

inline std::vector<double> doubles(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

inline std::vector<double> doubles(const std::vector<BFloat16>& x) {
  std::vector<double> wide;
  wide.reserve(x.size());
  for (BFloat16 value : x)
    wide.push_back(static_cast<double>(to_float(value)));
  return wide;
}

/// |got - right| <= relative * |right| + absolute(element), for every element.
template <class T, class Absolute>
void expect_near(const std::vector<T>& got, const std::vector<double>& right, double relative,
                 Absolute absolute) {
  const std::vector<double> wide = doubles(got);
  ASSERT_EQ(wide.size(), right.size());
  for (size_t i = 0; i < wide.size(); ++i)
    ASSERT_LE(std::abs(wide[i] - right[i]), relative * std::abs(right[i]) + absolute(i))
        << "element " << i << ": " << wide[i] << " instead of " << right[i];
}

}  // namespace longhalo::testing
