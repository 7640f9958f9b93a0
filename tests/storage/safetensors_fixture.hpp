// Builds safetensors files byte by byte, valid or damaged.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace longhalo::testing {

inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  const auto length = static_cast<uint64_t>(header.size());
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file.append(header).append(data);
}

template <class T>
std::string raw(std::initializer_list<T> values) {
  std::string bytes;
  for (const T& value : values)
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  return bytes;
}

// Three tensors of three types; the bf16 one begins at an odd multiple of its size after an odd header
// length.
inline std::string valid_header() {
  return R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
         R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"F16","shape":[1,2],"data_offsets":[22,26]},)"
         R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[26,26]}})";
}
inline std::string valid_data() {
  return raw<float>({1.0F, -2.5F, 3.0F, 0.1F}) + raw<uint16_t>({0x3f80, 0xc000, 0x7f80}) +
         raw<uint16_t>({0x3c00, 0xfbff});
}
inline std::string valid_file() {
  return safetensors_bytes(valid_header(), valid_data());
}

}  // namespace longhalo::testing
