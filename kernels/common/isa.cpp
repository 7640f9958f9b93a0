#include "kernels/common/isa.hpp"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

Isa choose() {
  Isa best = Isa::kBaseline;
  for (Isa isa : {Isa::kAvx2, Isa::kAvx512})
    if (isa_available(isa)) best = isa;
  const char* word = std::getenv("LONGHALO_ISA");
  if (word == nullptr || *word == '\0') return best;
  for (Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512})
    if (std::string_view(word) == isa_name(isa) && isa_available(isa)) return isa;
  throw UserError(text("'", word, "' is not an instruction set that this CPU can run"),
                  "environment variable LONGHALO_ISA",
                  text("unset it, or give one of baseline, avx2, avx512 (best here: ", isa_name(best), ")"));
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{choose()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool isa_available(Isa isa) {
#if defined(LONGHALO_X86)
  // These lists match the compiler flags in kernels/CMakeLists.txt.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
#endif
  return isa == Isa::kBaseline;
}

Isa current_isa() {
  return chosen().load(std::memory_order_relaxed);
}

void use_isa(Isa isa) {
  check(isa_available(isa), "an instruction set in use is one that this CPU has");
  chosen().store(isa, std::memory_order_relaxed);
}

}  // namespace longhalo
