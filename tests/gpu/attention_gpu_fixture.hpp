// Fixture of the tests of attention kernels on the GPU: each test runs once for each kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "attention_gpu_problem.hpp"
#include "gpu_test.hpp"

namespace longhalo::testing {

class AttentionKernelTest : public GpuTest, public ::testing::WithParamInterface<AttentionKernel> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const DeviceInfo& info = device().info();
    if (GetParam() == AttentionKernel::kHopper && !info.is_hopper())
      GTEST_SKIP() << "the Hopper kernel needs compute capability 9.0; " << info.name << " has " << info.major
                   << "." << info.minor;
  }
  static void set_heads(AttentionProblem& p, int64_t kv_heads, int64_t group, int64_t head_dim) {
    p.kv_heads = kv_heads, p.heads = kv_heads * group, p.head_dim = head_dim;
  }
  /// So many queries as the kernel takes: n, or the last few of them.
  static void set_queries(AttentionProblem& p, int64_t first_query, int64_t n) {
    p.queries = GetParam() == AttentionKernel::kDecode ? std::min(n, kGpuDecodeQueries) : n;
    p.first_query = first_query + n - p.queries;
  }
};

/// For INSTANTIATE_TEST_SUITE_P.
inline std::string kernel_name(const ::testing::TestParamInfo<AttentionKernel>& info) {
  return info.param == AttentionKernel::kHopper     ? "Hopper"
         : info.param == AttentionKernel::kPortable ? "Portable"
                                                    : "Decode";
}

}  // namespace longhalo::testing
