// The readers of files that come from elsewhere, each behind one door: bytes in, and either the reader takes
// them or it throws a UserError. Anything else is a fault: another exception, a signal, a sanitizer's report,
// an endless loop. libFuzzer (fuzzer.cpp) and the test that runs the stored files (corpus_test.cpp) go
// through the same doors.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace longhalo::fuzz {

using Bytes = std::span<const std::byte>;

struct Target {
  std::string_view name;  // also of its folders in corpus/ and crashes/
  void (*read)(Bytes);    // throws whatever the reader throws
};

std::span<const Target> all_targets();

enum class Outcome { kTaken, kRefused };

/// Gives the bytes to the reader; a UserError means kRefused. Everything else gets out.
Outcome run(const Target& target, Bytes bytes);

}  // namespace longhalo::fuzz
