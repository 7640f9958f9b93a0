// What the matrix products of a model are computed in.
#pragma once

namespace longhalo {

/// kFp32 on the CPU. On the GPU kBf16; kFp8 makes the layers' products in e4m3, all else in bf16.
enum class Precision { kFp32, kBf16, kFp8 };

inline const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kFp32:
      return "fp32";
    case Precision::kBf16:
      return "bf16";
    case Precision::kFp8:
      return "fp8";
  }
  return "";
}

}  // namespace longhalo
