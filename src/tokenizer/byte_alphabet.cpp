#include "tokenizer/byte_alphabet.hpp"

#include "tokenizer/utf8.hpp"

namespace longhalo {
namespace {

constexpr uint32_t kFirstStandIn = 0x100;
constexpr uint32_t kStandIns = 68;  // bytes that are not printable in Latin-1

bool is_printable(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

std::array<uint32_t, 256> make_alphabet() {
  std::array<uint32_t, 256> alphabet{};
  uint32_t next = kFirstStandIn;
  for (uint32_t byte = 0; byte < 256; ++byte)
    alphabet[byte] = is_printable(byte) ? byte : next++;
  return alphabet;
}

}  // namespace

const std::array<uint32_t, 256>& byte_alphabet() {
  static const std::array<uint32_t, 256> alphabet = make_alphabet();
  return alphabet;
}

std::optional<std::string> bytes_of_spelling(std::string_view spelling) {
  static const std::array<char, kFirstStandIn + kStandIns> byte_of = [] {
    std::array<char, kFirstStandIn + kStandIns> inverse{};
    for (uint32_t byte = 0; byte < 256; ++byte)
      inverse[byte_alphabet()[byte]] = static_cast<char>(byte);
    return inverse;
  }();
  std::string bytes;
  bytes.reserve(spelling.size());
  for (size_t at = 0; at < spelling.size();) {
    const CodePoint next = code_point_at(spelling, at);
    const bool in_alphabet = next.length_bytes > 0 && next.value < byte_of.size() &&
                             (next.value >= kFirstStandIn || is_printable(next.value));
    if (!in_alphabet) return std::nullopt;
    bytes.push_back(byte_of[next.value]);
    at += static_cast<size_t>(next.length_bytes);
  }
  return bytes;
}

}  // namespace longhalo
