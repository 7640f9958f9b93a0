// SHA-256 (FIPS 180-4) of files and texts, to tell a user which tokenizer file a token file was made with;
// the numbers are those of the sha256sum command.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace longhalo {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  /// 64 lower-case hexadecimal digits. Call once, last.
  std::string hex();

 private:
  void compress(const std::byte* block);

  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  size_t filled_ = 0;
  uint64_t length_bytes_ = 0;
};

std::string sha256_of_text(std::string_view text);
/// Throws UserError if the file cannot be read.
std::string sha256_of_file(const std::filesystem::path& file);

}  // namespace longhalo
