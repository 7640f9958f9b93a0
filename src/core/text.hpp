// Builds a message from parts: text("layer ", 3, " has ", n, " rows").
#pragma once

#include <sstream>
#include <string>

namespace longhalo {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace longhalo
