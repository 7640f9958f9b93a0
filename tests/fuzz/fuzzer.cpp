// One fuzzer of libFuzzer: LONGHALO_FUZZ_TARGET names the reader. scripts/fuzz.sh builds and runs all of
// them.
#include <algorithm>
#include <cstdint>

#include "core/error.hpp"
#include "fuzz/targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longhalo::fuzz;
  static const Target* const target = [] {
    const auto targets = all_targets();
    const auto found = std::find_if(targets.begin(), targets.end(),
                                    [](const Target& one) { return one.name == LONGHALO_FUZZ_TARGET; });
    longhalo::check(found != targets.end(), "the target exists");
    return &*found;
  }();
  run(*target, std::as_bytes(std::span(data, size)));
  return 0;
}
