// Fixtures of the tests of several ranks with GPUs: RankTest gives each rank its GPU (local rank modulo
// visible ones); TransportTest also a transport, for each kind. A kind that does not work here is skipped,
// with the reason that make_transport() gives.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "comm/transport.hpp"
#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "support/mpi_main.hpp"

namespace longhalo::testing {

class RankTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_devices() == 0) GTEST_SKIP() << "no GPU: " << why_no_device();
    check_cuda(cudaSetDevice(device().info().index), "selecting a GPU");
  }
  /// Made once for the whole program and never destroyed.
  static Device& device() {
    static auto* device = new Device(test::session().local_rank() % visible_devices());
    return *device;
  }
  static cudaStream_t stream() { return device().compute(); }
};

class TransportTest : public RankTest, public ::testing::WithParamInterface<TransportChoice> {
 protected:
  void SetUp() override {
    RankTest::SetUp();
    if (IsSkipped()) return;
    Known& known = all()[GetParam()];
    if (known.transport == nullptr && known.refusal.empty()) {
      try {
        known.transport = make_transport(test::session(), GetParam(), device().info()).transport;
      } catch (const UserError& error) {
        known.refusal = error.what();
      }
    }
    if (known.transport != nullptr) return;
    // What a machine may lack is a reason to skip; that a transport fails where it should work is none.
    for (const char* lack : {"share a GPU", "has no NCCL", "without CUDA", "no way to say", "does not grant"})
      if (known.refusal.find(lack) != std::string::npos) GTEST_SKIP() << known.refusal;
    FAIL() << known.refusal;
  }
  static void TearDownTestSuite() { all().clear(); }  // before MPI ends
  Transport& transport() { return *all().at(GetParam()).transport; }

 private:
  struct Known {
    std::unique_ptr<Transport> transport;
    std::string refusal;
  };
  static std::map<TransportChoice, Known>& all() {
    static std::map<TransportChoice, Known> known;
    return known;
  }
};

#define LONGHALO_EACH_TRANSPORT(Suite)                                                            \
  INSTANTIATE_TEST_SUITE_P(                                                                       \
      Each, Suite,                                                                                \
      ::testing::Values(TransportChoice::kStaged, TransportChoice::kNccl, TransportChoice::kMpi), \
      [](const auto& parameter) { return std::string(name_of(parameter.param)); })

}  // namespace longhalo::testing
