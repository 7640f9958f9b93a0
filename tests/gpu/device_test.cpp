// The device room: memory that is counted and reused, copies, events, and errors that say what to do.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "device/device_buffer.hpp"
#include "device/pinned_buffer.hpp"
#include "gpu_test.hpp"

namespace longhalo::testing {
namespace {

class DeviceRoom : public GpuTest {};

TEST_F(DeviceRoom, BytesMakeTheRoundTrip) {
  std::vector<int64_t> values(100'003);
  std::iota(values.begin(), values.end(), 17);
  const DeviceBuffer<int64_t> there = to_device<int64_t>(values, "numbers", stream());
  std::vector<int64_t> back(values.size(), -1);
  to_host<int64_t>(back, there.data(), stream());
  EXPECT_EQ(back, values);
}

TEST_F(DeviceRoom, ThePoolCountsWhatArraysHold) {
  device().synchronize();
  memory_pool().reset_high_marks();
  const int64_t before = memory_pool().use().used_bytes;
  constexpr int64_t kBytes = int64_t{64} << 20;
  {
    const DeviceBuffer<uint8_t> one(kBytes, "one", stream());
    const DeviceBuffer<uint8_t> two(kBytes, "two", stream());
    EXPECT_EQ(memory_pool().use().used_bytes, before + 2 * kBytes);
  }
  device().synchronize();
  const PoolUse after = memory_pool().use();
  EXPECT_EQ(after.used_bytes, before);
  EXPECT_EQ(after.used_high_bytes, before + 2 * kBytes);
  EXPECT_GE(after.reserved_high_bytes, after.used_high_bytes);
  EXPECT_GE(after.fragmentation(), 0);
  EXPECT_LT(after.fragmentation(), 1);
}

TEST_F(DeviceRoom, MemoryThatRanOutIsSaidWithItsPurposeAndLosesNothing) {
  const DeviceBuffer<uint8_t> kept = to_device<uint8_t>(std::vector<uint8_t>{1, 2, 3}, "kept", stream());
  try {
    const DeviceBuffer<uint8_t> huge(device().info().total_bytes * 2, "a sequence too long", stream());
    FAIL() << "twice the card's memory was allocated";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("a sequence too long"), std::string::npos) << error.what();
  }
  std::vector<uint8_t> back(3);
  to_host<uint8_t>(back, kept.data(), stream());
  EXPECT_EQ(back, (std::vector<uint8_t>{1, 2, 3}));
}

TEST_F(DeviceRoom, AStreamWaitsForAnotherStreamsEvent) {
  constexpr int64_t kCount = int64_t{1} << 24;
  PinnedBuffer<int> source(kCount, "source"), target(kCount, "target");
  for (int round = 1; round <= 20; ++round) {
    std::fill(source.span().begin(), source.span().end(), round);
    DeviceBuffer<int> there(kCount, "there", stream());
    copy_async(there.data(), source.data(), kCount, stream());
    Event filled;
    filled.record(stream());
    filled.make_wait(device().copy());
    copy_async(target.data(), there.data(), kCount, device().copy());
    device().copy().synchronize();
    ASSERT_EQ(target[0], round);
    ASSERT_EQ(target[kCount - 1], round);
  }
}

TEST_F(DeviceRoom, ADeviceThatIsNotThereIsRefused) {
  EXPECT_THROW(Device{visible_devices()}, UserError);
  EXPECT_THROW(Device{-1}, UserError);
}

}  // namespace
}  // namespace longhalo::testing
