// One binary for every node: the inner loops are compiled once for each instruction set (the *_simd.cpp
// files) and chosen at run time by what this CPU has.
//
// A *_simd.cpp file puts everything in namespace LONGHALO_ISA, which the build sets to one of the names
// below, and exports one constant struct of function pointers. NOTE: it must not emit shared inline functions
// (std:: templates, other rooms' helpers): the linker keeps one copy of those, and a copy made with AVX-512
// would crash an older CPU. tests/kernels checks that none is emitted.
#pragma once

namespace longhalo {

enum class Isa { kBaseline, kAvx2, kAvx512 };

const char* isa_name(Isa isa);

/// Whether this CPU (and this build) can run `isa`.
bool isa_available(Isa isa);

/// What the kernels run with: the best available one, unless the environment variable LONGHALO_ISA or
/// use_isa() says otherwise. LONGHALO_ISA is baseline, avx2 or avx512; another word, or one that this CPU
/// lacks, is a UserError.
Isa current_isa();

/// Overrides current_isa() from now on, for tests and measurements. Must be available.
void use_isa(Isa isa);

}  // namespace longhalo

#if defined(LONGHALO_X86)
#define LONGHALO_DECLARE_SIMD(Type, name) \
  namespace isa_baseline {                \
  extern const Type name;                 \
  }                                       \
  namespace isa_avx2 {                    \
  extern const Type name;                 \
  }                                       \
  namespace isa_avx512 {                  \
  extern const Type name;                 \
  }
#define LONGHALO_SIMD(name)                         \
  (current_isa() == Isa::kAvx512 ? isa_avx512::name \
   : current_isa() == Isa::kAvx2 ? isa_avx2::name   \
                                 : isa_baseline::name)
#else
#define LONGHALO_DECLARE_SIMD(Type, name) \
  namespace isa_baseline {                \
  extern const Type name;                 \
  }
#define LONGHALO_SIMD(name) (isa_baseline::name)
#endif
