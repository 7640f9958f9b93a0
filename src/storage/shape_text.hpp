// A shape as messages show it: "[49152, 576]".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/text.hpp"

namespace longhalo {

inline std::string shape_text(std::span<const int64_t> shape) {
  std::string result = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    result += text(i == 0 ? "" : ", ", shape[i]);
  return result + "]";
}

}  // namespace longhalo
