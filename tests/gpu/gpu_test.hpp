// Fixture of the tests that need a GPU: without one they are skipped and say why.
#pragma once

#include <gtest/gtest.h>

#include "device/device.hpp"

namespace longhalo::testing {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_devices() == 0) GTEST_SKIP() << "no GPU: " << why_no_device();
  }
  /// GPU 0, made once for the whole program and never destroyed.
  static Device& device() {
    static auto* device = new Device(0);
    return *device;
  }
  static cudaStream_t stream() { return device().compute(); }
};

}  // namespace longhalo::testing
