// The alphabet of byte-level BPE: every byte is written as one printable character, so that a vocabulary of
// byte strings can be a JSON file. Printable Latin-1 bytes stand for themselves, the other 68 are U+0100 and
// up in order (Radford et al. 2019, GPT-2).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace longhalo {

/// The character that stands for each byte.
const std::array<uint32_t, 256>& byte_alphabet();

/// The bytes that a token is spelled with, or nothing if a character is not of the alphabet.
std::optional<std::string> bytes_of_spelling(std::string_view spelling);

}  // namespace longhalo
