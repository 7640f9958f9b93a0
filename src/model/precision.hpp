// What the matrix products of a model are computed in.
#pragma once

namespace longhalo {

/// kFp32 on the CPU. On the GPU kBf16; kFp8 makes the layers' products in e4m3 (all but a few:
/// device_weights.hpp), kInt8 in int8, both with a scale a token and an output channel, all else in bf16.
enum class Precision { kFp32, kBf16, kFp8, kInt8 };

inline bool has_eight_bits(Precision precision) {
  return precision == Precision::kFp8 || precision == Precision::kInt8;
}

inline const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kFp32:
      return "fp32";
    case Precision::kBf16:
      return "bf16";
    case Precision::kFp8:
      return "fp8";
    case Precision::kInt8:
      return "int8";
  }
  return "";
}

}  // namespace longhalo
