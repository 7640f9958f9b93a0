// Conversions of stored tensors to fp32: plain loops without branches, which the compiler vectorises.
// Elements are loaded by memcpy because a tensor's bytes need not be aligned for its type.
#include <bit>
#include <cstring>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/safetensors.hpp"

namespace longhalo {
namespace {

void convert_bf16(const std::byte* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
  }
}

// Exponent and mantissa of a half, moved into a float's place, read as that float times 2^-112, subnormals
// too: multiplying by 2^112 is exact. Only infinities and NaN need the exponent of all ones.
void convert_f16(const std::byte* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000u;
    out[i] = std::bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
  }
}

}  // namespace

void copy_as_float(const TensorView& tensor, std::span<float> out) {
  check(static_cast<int64_t>(out.size()) == tensor.elements(),
        "the output holds as many elements as the tensor");
  if (out.empty()) return;
  switch (tensor.dtype) {
    case Dtype::kF32:
      std::memcpy(out.data(), tensor.bytes.data(), tensor.bytes.size());
      return;
    case Dtype::kBF16:
      return convert_bf16(tensor.bytes.data(), out.data(), out.size());
    case Dtype::kF16:
      return convert_f16(tensor.bytes.data(), out.data(), out.size());
    default:
      throw UserError(text("weights of type ", dtype_name(tensor.dtype), " are not supported"),
                      text(tensor.file, ", tensor ", tensor.name),
                      "convert the model to F32, BF16 or F16 safetensors");
  }
}

}  // namespace longhalo
