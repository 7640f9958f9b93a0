// A fixture that runs a test once with every instruction set of kernels/common/isa.hpp.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "kernels/common/isa.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
inline void PrintTo(Isa isa, std::ostream* out) {
  *out << isa_name(isa);
}
}  // namespace longhalo

namespace longhalo::testing {

class WithIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!isa_available(GetParam())) GTEST_SKIP() << "this CPU does not have " << isa_name(GetParam());
    use_isa(GetParam());
    set_kernel_threads(1);  // more where a test asks for them: with_threads()
  }
  void TearDown() override {
    use_isa(before_);
    set_kernel_threads(threads_before_);
  }

 private:
  Isa before_ = current_isa();
  int threads_before_ = kernel_threads();
};

/// Runs `body` with 1, 2, 3 and 5 threads, then sets the number back.
template <class Body>
void with_threads(const Body& body) {
  const int before = kernel_threads();
  for (int threads : {1, 2, 3, 5}) {
    set_kernel_threads(threads);
    body(threads);
  }
  set_kernel_threads(before);
}

inline auto all_isas() {
  return ::testing::Values(Isa::kBaseline, Isa::kAvx2, Isa::kAvx512);
}
inline std::string isa_test_name(const ::testing::TestParamInfo<Isa>& info) {
  return isa_name(info.param);
}

}  // namespace longhalo::testing
