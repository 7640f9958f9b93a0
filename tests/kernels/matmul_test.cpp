// Matrix products against the fp64 definition: every small number of rows (decode) and odd shapes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <limits>

#include "core/error.hpp"
#include "kernels/matmul/matmul.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class Matmul : public WithIsa {};

TEST_P(Matmul, AgreesWithTheDefinition) {
  for (int64_t m : {1, 2, 3, 4, 5, 8, 33}) {
    for (auto [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {64, 64}, {65, 576}, {193, 1001}}) {
      for (Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
        const bool add = accumulate == Accumulate::kAdd;
        const auto a = normal(m * in, 1), w = normal(out * in, 2), before = normal(m * out, 3);
        auto right = upcast(before), size = upcast(before);
        matmul_reference(m, out, in, upcast(a).data(), upcast(w).data(), right.data(), accumulate);
        auto a_size = upcast(a), w_size = upcast(w);
        for (auto* x : {&a_size, &w_size, &size})
          for (double& value : *x)
            value = std::abs(value);
        matmul_reference(m, out, in, a_size.data(), w_size.data(), size.data(), accumulate);
        std::vector<float> c = before;
        if (!add) std::fill(c.begin(), c.end(), std::numeric_limits<float>::quiet_NaN());
        matmul(m, out, in, a.data(), w.data(), c.data(), accumulate);
        // A sum of `in` + 1 terms errs by at most (in + 1) u of its magnitudes (Higham, Accuracy and
        // Stability, 3.5).
        expect_close(c, right, size, static_cast<double>(in + 1) * kUnit);
        if (HasFatalFailure()) FAIL() << "m " << m << " out " << out << " in " << in << " add " << add;
      }
    }
  }
}

TEST_P(Matmul, DecodeGivesTheSameBitsForAnyNumberOfThreads) {
  const int64_t out = 1000, in = 333;
  const auto w = normal(out * in, 2);
  for (int64_t m : {1, 4}) {
    const auto a = normal(m * in, 1);
    std::vector<float> first;
    with_threads([&](int threads) {
      std::vector<float> c(static_cast<size_t>(m * out));
      matmul(m, out, in, a.data(), w.data(), c.data());
      if (threads == 1) first = c;
      EXPECT_EQ(c, first) << threads << " threads";
    });
  }
}

TEST_P(Matmul, NoRowsIsNoWork) {
  matmul(0, 3, 4, nullptr, nullptr, nullptr);
}

TEST(MatmulRate, IsPlausible) {
  const double rate = measure_matmul_rate(0.01);
  EXPECT_GT(rate, 1e8);
  EXPECT_LT(rate, 1e14);
}

// OpenBLAS would ask for its buffers again and again; ulimit -v is such a limit.
TEST(KernelThreadsDeathTest, NoRoomForBuffersIsAnErrorAndNoEndlessWait) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer itself takes more memory than a limit would leave";
#endif
  const auto limited = [] {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + (int64_t{64} << 20));
    const struct rlimit address_space = {limit, limit};
    if (::setrlimit(RLIMIT_AS, &address_space) != 0) ::_exit(3);
    try {
      set_kernel_threads(kernel_threads() + 1);
    } catch (const UserError& error) {
      std::cerr << error.what() << std::endl;
      ::_exit(2);
    }
    ::_exit(0);
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(2), "out of host memory.*OpenBLAS(.|\n)*ulimit -v");
}

TEST(KernelThreads, AtLeastOne) {
  EXPECT_THROW(set_kernel_threads(0), InvariantError);
  const int before = kernel_threads();
  set_kernel_threads(2);
  EXPECT_EQ(kernel_threads(), 2);
  set_kernel_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Cpu, Matmul, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing
